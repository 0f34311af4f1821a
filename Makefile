# Two commands do everything on a fresh Debian or Ubuntu machine with Python 3.11+ and g++:
#   make demo    install, then train the tiny model asynchronously until it can add (runs/demo)
#   make test    install, then run the tests
# On a machine with an NVIDIA GPU:  make demo GPU=1   (CUDA builds of torch and SGLang)
PYTHON ?= python3
GPU    ?= 0
# Keys of the demo's configuration to change, e.g. OVERRIDES="run.dir=runs/mine run.steps=20"
OVERRIDES ?=
TORCH  := 2.13.0
TRAIN  := .venv
ENGINE := .venv-engine
NEXT   := .venv-next
PEERS  := .venv-peers
PIP    := -m pip install --quiet --disable-pip-version-check
# Both environments are installed side by side, and the trainer's is linted while the engine's still is.
MAKEFLAGS += --jobs=2

.PHONY: setup bench-peers demo docs test test-thorough test-unit test-megatron-next sanitize lint clean
.DELETE_ON_ERROR:

setup: $(TRAIN)/.installed $(TRAIN)/.built $(ENGINE)/.installed

# Redis (the server is the system's redis-server) and Ray, for PYTHONPATH=.venv-peers/site .venv/bin/asyncmoe bench queue
bench-peers: setup
	$(TRAIN)/bin/python $(PIP) --no-deps --upgrade --target $(PEERS)/site -r requirements/bench.txt

# With GPU=1 the demo for as many GPUs as a process is shown: make prints which.
SHOWN = $(shell $(TRAIN)/bin/python -c 'import torch; print(torch.cuda.device_count())')
DEMO  = examples/demo$(if $(filter 1,$(GPU)),$(if $(filter 0 1,$(SHOWN)),-gpu,-gpus)).yaml

demo: setup
	$(TRAIN)/bin/asyncmoe run $(DEMO) $(OVERRIDES)

# docs/config.md, from the schema of the configuration.
docs: setup
	$(TRAIN)/bin/python docs/generate.py

# Unit tests take one core each. All others start many processes of their own; whole runs wait more than they compute, so two go at a time.
test: setup lint $(TRAIN)/.system
	$(TRAIN)/bin/python -m pytest -n 2 --dist loadfile tests/unit
	$(TRAIN)/bin/python -m pytest tests/ranks tests/gpu tests/engine
	$(TRAIN)/bin/python -m pytest -n 2 --dist loadfile tests/system

# Every layout in every way, and other random cases in every run: for a change to the trainer's parallelism or to the resharding.
test-thorough: setup lint $(TRAIN)/.system
	$(TRAIN)/bin/python -m pytest --thorough -n 2 --dist loadfile tests/unit
	$(TRAIN)/bin/python -m pytest --thorough tests/ranks tests/gpu tests/engine
	$(TRAIN)/bin/python -m pytest --thorough -n 2 --dist loadfile tests/system

test-unit: setup lint $(TRAIN)/.system
	$(TRAIN)/bin/python -m pytest -n 2 --dist loadfile tests/unit

# The extension under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own.
sanitize: setup
	PYTHON=$(TRAIN)/bin/python tests/sanitize.sh

lint: $(TRAIN)/.built
	$(TRAIN)/bin/ruff check .
	$(TRAIN)/bin/ruff format --check .
	$(TRAIN)/bin/mypy
	$(TRAIN)/bin/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp csrc/*.cu csrc/record/*

# The rank tests on the newest megatron-core: an overlay in front of the same environment. It declares Python >= 3.12 but runs on 3.11.
test-megatron-next: setup $(NEXT)/.installed
	PYTHONPATH=$(CURDIR)/$(NEXT)/site $(TRAIN)/bin/python -m pytest tests/ranks

$(TRAIN)/.installed: requirements/train.txt requirements/dev.txt requirements/torch.sh
	@$(PYTHON) requirements/check_python.py
	$(PYTHON) -m venv $(TRAIN)
	GPU=$(GPU) requirements/torch.sh $(TRAIN)/bin/python $(TORCH)
	$(TRAIN)/bin/python $(PIP) -r requirements/train.txt -r requirements/dev.txt
	@touch $@

$(TRAIN)/.built: $(TRAIN)/.installed pyproject.toml setup.py $(wildcard csrc/* csrc/record/*)
	$(TRAIN)/bin/python $(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

# Debian packages that some tests want; without them these are skipped.
$(TRAIN)/.system: $(TRAIN)/.installed requirements/system.sh
	requirements/system.sh
	@touch $@

# SGLang pins other versions than the trainer wants, so it has an environment of its own; the .pth file shows it this checkout.
$(ENGINE)/.installed: requirements/engine-cpu.txt requirements/engine-cpu-nodeps.txt requirements/torch.sh
	@$(PYTHON) requirements/check_python.py
	$(PYTHON) -m venv $(ENGINE)
ifeq ($(GPU),1)
	$(ENGINE)/bin/python $(PIP) sglang==0.5.23
else
	GPU=0 requirements/torch.sh $(ENGINE)/bin/python $(TORCH)
	$(ENGINE)/bin/python $(PIP) -r requirements/engine-cpu.txt
	$(ENGINE)/bin/python $(PIP) --no-deps -r requirements/engine-cpu-nodeps.txt
endif
	echo $(CURDIR) > $$($(ENGINE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/asyncmoe.pth
	@touch $@

$(NEXT)/.installed: $(TRAIN)/.installed
	$(TRAIN)/bin/python $(PIP) --no-deps --ignore-requires-python --target $(NEXT)/site megatron-core==0.19.2 triton
	@touch $@

clean:
	rm -rf $(TRAIN) $(ENGINE) $(NEXT) $(PEERS) build asyncmoe.egg-info asyncmoe/reshard/_C*.so asyncmoe/record/_C*.so
