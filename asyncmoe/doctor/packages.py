"""Checks of Python packages: the trainer's, and those in the engines' Python."""

from __future__ import annotations

from asyncmoe.doctor import finding, versions
from asyncmoe.doctor.facts import Machine, PythonFacts
from asyncmoe.doctor.finding import Finding
from asyncmoe.installed import fix, rebuild_with_kernels

_BUILD_TE = "run: make transformer-engine GPU=1"
"""Not plain pip, which would build the PyTorch extension against a torch different from the installed one."""


def packages(machine: Machine) -> Finding:
    """Check that what trainer and controller import is installed in the declared range."""
    trainer = machine.trainer
    if wrong := [told for name in machine.train if (told := _wrong(machine, trainer, name))]:
        return finding.error(f"{'; '.join(wrong)}, in {trainer.executable}", f"run: {fix(gpu=machine.nvidia.present)}")
    megatron = f"Python {trainer.version} ({trainer.executable}), megatron-core {trainer.packages.get('megatron-core')}"
    return finding.ok(f"{megatron}; {len(machine.train)} requirements are installed in their ranges")


def torch(machine: Machine) -> Finding:
    """Check that the trainer's torch and optional kernels can be used; the check `cuda` compares torch with the driver."""
    trainer = machine.trainer
    if trainer.torch is None or trainer.kernels is None:
        return finding.error(f"{trainer.packages.get('torch', 'not installed')}; {trainer.unfinished}", f"mend that, or run: {fix()}")
    return finding.ok(trainer.torch.version + (f" for CUDA {trainer.torch.cuda}" if trainer.torch.cuda else ", for the CPU"))


def transformer_engine(machine: Machine) -> Finding:
    """Check Transformer Engine: only speed on GPUs needs it, but a broken installation stops the trainer there."""
    trainer, name = machine.trainer, "transformer-engine"
    if not machine.nvidia.present:
        return finding.absent("without a GPU it is not used")
    if name not in trainer.packages:
        slow = "not installed: layers and optimizer are Megatron's slower ones"
        return finding.warning(slow, f"{_BUILD_TE}; .venv/transformer-engine.log says why it failed")
    if wrong := _wrong(machine, trainer, name):
        return finding.error(wrong, _BUILD_TE)
    if not trainer.transformer_engine:
        fresh = f"{_BUILD_TE} to build it for this torch and CUDA, or uninstall it"
        return finding.error(f"{trainer.packages[name]} cannot be imported: {trainer.unfinished}", fresh)
    return finding.ok(trainer.packages[name])


def engine_python(machine: Machine) -> Finding:
    """Check that the engines' Python starts, imports torch, and finds asyncmoe with a working extension."""
    engine, theirs = machine.engine_python, machine.engine_python.extension
    install = f"run: {_engine(machine)}"
    if engine.version is None or engine.torch is None or theirs is None:
        why = engine.unfinished or "torch is not installed"
        return finding.error(f"{engine.executable}: {why}", f"{install}, or set engines.python to a Python that has SGLang")
    if theirs.trouble is not None:
        way = f"{install}; it was built with Python {machine.trainer.version}; a .pth file in site-packages may name the directory above it"
        return finding.error(f"asyncmoe, with which engines load weights, cannot be imported by {engine.executable}: {theirs.trouble}", way)
    if machine.nvidia.present and engine.torch.cuda is not None and not theirs.cuda:
        found = f"asyncmoe's extension as {engine.executable} loads it ({theirs.package}) is built without CUDA kernels"
        return finding.error(found, rebuild_with_kernels())
    return finding.ok(f"{engine.version} with torch {engine.torch.version} ({engine.executable})")


def sglang(machine: Machine) -> Finding:
    """Check for the only version whose internals the engines' loader supports."""
    if wrong := _wrong(machine, machine.engine_python, "sglang"):
        wanted = machine.requirements.get("sglang", "")
        return finding.error(wrong, f"set engines.python to a Python that has sglang{wanted}, or run: {_engine(machine)}")
    return finding.ok(machine.engine_python.packages["sglang"])


def _wrong(machine: Machine, where: PythonFacts, name: str) -> str | None:
    """Say what is wrong if a package is not installed in the declared range."""
    wanted = machine.requirements.get(name, "")
    if name not in where.packages:
        return f"{name} is not installed in {where.executable}"
    return None if versions.within(where.packages[name], wanted) else f"{name} is {where.packages[name]}, and has to be {wanted}"


def _engine(machine: Machine) -> str:
    return fix("engine", gpu=machine.nvidia.present, python=machine.engine_python.executable)
