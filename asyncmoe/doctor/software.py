"""Checks of Python packages: the trainer's packages, and SGLang in the engines' Python."""

from __future__ import annotations

from asyncmoe.doctor import verdict, versions
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.python_facts import PythonFacts
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.installed import fix, from_checkout, rebuild_with_kernels

_OWN_LINE = frozenset({"torch", "megatron-core"})
"""Requirements of the trainer with a check of their own."""
_BUILD_TE = "run: make transformer-engine GPU=1"
"""Not plain pip, which would build the PyTorch extension against a torch different from the installed one."""


def python(machine: Machine) -> Verdict:
    """Check the trainer's Python version."""
    trainer, wanted = machine.trainer, machine.requirements["python"]
    if trainer.version is None:
        return verdict.error(f"{trainer.executable} could not be run: {trainer.unfinished}", f"run: {fix()}")
    if not versions.within(trainer.version, wanted):
        return verdict.error(trainer.version, f"install a newer Python, then run: {_anew()}", wanted)
    return verdict.ok(f"{trainer.version} ({trainer.executable})")


def torch(machine: Machine) -> Verdict:
    """Check that the trainer's torch is installed, in range and importable; the check `cuda` compares it with the driver."""
    return declared(machine, machine.trainer, "torch", f"run: {fix(gpu=machine.nvidia.present)}") or _imported(machine.trainer)


def megatron_core(machine: Machine) -> Verdict:
    """Check for a version whose internals the trainer supports."""
    found = declared(machine, machine.trainer, "megatron-core", _pip(machine, "megatron-core"))
    return found or verdict.ok(machine.trainer.packages["megatron-core"])


def transformer_engine(machine: Machine) -> Verdict:
    """Check Transformer Engine: only speed on GPUs needs it, but a broken installation stops the trainer there."""
    name = "transformer-engine"
    if name not in machine.trainer.packages:
        if not machine.nvidia.present:
            return verdict.absent("not installed; without a GPU it is not used")
        return verdict.warning(
            "not installed: layers and optimizer are Megatron's slower ones",
            f"{_BUILD_TE}; .venv/transformer-engine.log says why it failed",
        )
    if found := declared(machine, machine.trainer, name, _BUILD_TE):
        return found
    version = machine.trainer.packages[name]
    if not machine.nvidia.present:
        return verdict.ok(f"{version}; without a GPU it is not used")
    if not machine.trainer.transformer_engine:
        why = machine.trainer.unfinished or "torch could not be imported before it"
        return verdict.error(f"{version} cannot be imported: {why}", f"{_BUILD_TE} to build it for this torch and CUDA, or uninstall it")
    return verdict.ok(version)


def apex(machine: Machine) -> Verdict:
    """Check that an installed apex is NVIDIA's; `pip install apex` installs a web toolkit of the same name."""
    found, version = machine.trainer.apex, machine.trainer.packages.get("apex", "of unknown version")
    if found is None:
        return verdict.absent("not installed; Transformer Engine or torch have what is needed of it")
    if not found.nvidia:
        return verdict.error(
            f"apex {version} is not NVIDIA's but the web toolkit of that name on PyPI",
            f"{machine.trainer.executable} -m pip uninstall apex; NVIDIA's is not on PyPI, and not needed",
        )
    if not found.kernels:
        return verdict.warning(
            f"NVIDIA's {version} without its CUDA kernels (amp_C)", "build it with --cpp_ext --cuda_ext, or uninstall it; it is not needed"
        )
    return verdict.ok(f"NVIDIA's {version} with CUDA kernels")


def packages(machine: Machine) -> Verdict:
    """Check all other packages that trainer and controller import."""
    has, wrong = machine.trainer.packages, []
    for name in machine.train:
        wanted = machine.requirements[name]
        if name not in _OWN_LINE and not (name in has and versions.within(has[name], wanted)):
            wrong.append(f"{name} {has.get(name, 'is missing')}" + (f" (expected {wanted})" if wanted else ""))
    if wrong:
        return verdict.error(", ".join(wrong), f"run: {fix()}")
    return verdict.ok(f"{len(machine.train)} requirements are installed in their ranges")


def engine_python(machine: Machine) -> Verdict:
    """Check that the engines' Python starts, imports torch, and finds the trainer's asyncmoe with a working extension."""
    engine = machine.engine_python
    if engine.version is None:
        return verdict.error(
            f"{engine.executable}: {engine.unfinished}", f"run: {_engine(machine)}, or set engines.python to a Python that has SGLang"
        )
    if engine.torch is None:
        return verdict.error(
            f"{engine.version} ({engine.executable}), but torch cannot be imported: {engine.unfinished or 'not installed'}",
            f"run: {_engine(machine)}",
        )
    ours, theirs = machine.trainer.extension, engine.extension
    if theirs is None or theirs.package is None:
        return verdict.error(
            f"{engine.executable} does not find asyncmoe, which engines load weights with",
            f"run: {_engine(machine)}, or write the directory above asyncmoe into a .pth file in its site-packages",
        )
    if theirs.trouble is not None:
        built = ours is not None and ours.trouble is None
        return verdict.error(
            f"asyncmoe's extension cannot be imported by {engine.executable}: {theirs.trouble}",
            f"use Python {machine.trainer.version}, which it was built with, for the engines too" if built else "see the line extension",
        )
    if machine.nvidia.present and engine.torch.cuda is not None and not theirs.cuda:
        return verdict.error(
            f"asyncmoe's extension as {engine.executable} loads it ({theirs.package}) is built without CUDA kernels",
            rebuild_with_kernels(),
        )
    if ours is not None and ours.package is not None and ours.package != theirs.package:
        return verdict.warning(
            f"engines load asyncmoe from {theirs.package}, the trainer from {ours.package}",
            "run: make setup in the directory you mean" if from_checkout() else "install the same wheel in both",
        )
    return verdict.ok(f"{engine.version} with torch {engine.torch.version} ({engine.executable})")


def sglang(machine: Machine) -> Verdict:
    """Check for the only version whose internals the engines' loader supports."""
    hint = f"set engines.python to a Python that has sglang{machine.requirements.get('sglang', '')}, or run: {_engine(machine)}"
    found = declared(machine, machine.engine_python, "sglang", hint)
    return found or verdict.ok(machine.engine_python.packages["sglang"])


def declared(machine: Machine, where: PythonFacts, name: str, hint: str) -> Verdict | None:
    """Return an error if a package is not installed in the declared range."""
    wanted = machine.requirements.get(name, "")
    if where.version is None:
        return verdict.error(f"unknown: {where.executable} could not be run", hint)
    if name not in where.packages:
        return verdict.error(f"not installed in {where.executable}", hint)
    if not versions.within(where.packages[name], wanted):
        return verdict.error(where.packages[name], hint, wanted)
    return None


def _imported(where: PythonFacts) -> Verdict:
    if where.torch is None:
        return verdict.error(f"{where.packages['torch']} cannot be imported: {where.unfinished}", f"run: {_anew()}")
    return verdict.ok(where.torch.version + (f" for CUDA {where.torch.cuda}" if where.torch.cuda else ", for the CPU"))


def _pip(machine: Machine, name: str) -> str:
    return f'{machine.trainer.executable} -m pip install "{name}{machine.requirements.get(name, "")}"'


def _engine(machine: Machine) -> str:
    return fix("engine", gpu=machine.nvidia.present, python=machine.engine_python.executable)


def _anew() -> str:
    return "make clean; make setup PYTHON=..." if from_checkout() else "python -m venv VENV; VENV/bin/pip install 'asyncmoe[train]'"
