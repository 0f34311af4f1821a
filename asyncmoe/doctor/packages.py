"""Check what is installed in the trainer's and the engines' Python: packages, asyncmoe's extension, NCCL, and torch's CUDA."""

from __future__ import annotations

from asyncmoe.config.transports import TRANSPORTS, either
from asyncmoe.doctor import finding, versions
from asyncmoe.doctor.facts import Machine, PythonFacts
from asyncmoe.doctor.finding import Finding
from asyncmoe.installed import fix, rebuild, rebuild_with_kernels

SAVER = "torch-memory-saver"
"""SGLang's requirement for --enable-memory-saver, which `placement: colocated` passes; only on GPUs."""
_BUILD_TE = "run: make transformer-engine GPU=1"
"""Plain pip would build Transformer Engine's PyTorch extension against another torch than the installed one."""


def packages(machine: Machine) -> Finding:
    """Check that the packages of trainer and controller are installed in their declared ranges."""
    trainer = machine.trainer
    if wrong := [told for name in machine.train if (told := _wrong(machine, trainer, name))]:
        return finding.error(f"{'; '.join(wrong)}, in {trainer.executable}", f"run: {fix(gpu=machine.nvidia.present)}")
    megatron = f"Python {trainer.version} ({trainer.executable}), megatron-core {trainer.packages.get('megatron-core')}"
    return finding.ok(f"{megatron}; {len(machine.train)} requirements are installed in their ranges")


def torch(machine: Machine) -> Finding:
    """Check that the trainer's torch and optional kernels can be used; the check `cuda` compares torch with the driver."""
    trainer = machine.trainer
    if trainer.torch is None or trainer.kernels is None:
        return finding.error(f"{trainer.packages.get('torch', 'not installed')}; {trainer.unfinished}", f"repair it, or run: {fix()}")
    return finding.ok(trainer.torch.version + (f" for CUDA {trainer.torch.cuda}" if trainer.torch.cuda else ", for the CPU"))


def transformer_engine(machine: Machine) -> Finding:
    """Check Transformer Engine: only speed on GPUs needs it, but a broken installation stops the trainer there."""
    trainer, name = machine.trainer, "transformer-engine"
    if not machine.nvidia.present:
        return finding.absent("without a GPU it is not used")
    if name not in trainer.packages:
        slow = "not installed: layers and optimizer are Megatron's slower ones"
        return finding.warning(slow, f"{_BUILD_TE}; if it failed before, .venv/transformer-engine.log says why")
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
        way = f"{install}; asyncmoe was built with Python {machine.trainer.version}; a .pth file may name its parent directory"
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
    found, in_turn = machine.engine_python.packages, machine.run is not None and machine.run.config.in_turn
    if in_turn and machine.nvidia.present and SAVER not in found:
        what = f"{SAVER}, by which engines release memory, is not installed in {machine.engine_python.executable}"
        return finding.error(what, f"run: {_engine(machine)}")
    return finding.ok(found["sglang"])


def extension(machine: Machine) -> Finding:
    """Check that the extension imports, was built from the current sources, and has CUDA kernels on a machine with GPUs."""
    found = machine.trainer.extension
    if found is None or found.trouble is not None:
        return finding.error(f"cannot be imported: {found.trouble if found is not None else machine.trainer.unfinished}", rebuild())
    if machine.nvidia.present and not found.cuda:
        return finding.error("built without CUDA kernels, on a machine with GPUs", rebuild_with_kernels())
    kernels = "with CUDA kernels" if found.cuda else "without CUDA kernels, as there is no GPU"
    if machine.sources and found.built_from != machine.sources:
        return finding.error(f"{kernels}, but built from other sources than those in csrc", rebuild())
    return finding.ok(kernels)


def nccl(machine: Machine) -> Finding:
    """Check that trainer and engines open the same NCCL version, because NCCL refuses a communicator of two versions."""
    if not machine.nvidia.present:
        return finding.absent(f"no GPU; weights go over {either([name for name, one in TRANSPORTS.items() if not one.gpu])}")
    found: dict[str, int] = {}
    for who, python in machine.pythons:
        if python.nccl.version is None:
            hint = f"run: {fix(gpu=True)}, or put the directory of libnccl.so.2 on LD_LIBRARY_PATH"
            return finding.error(f"{who} Python: {python.nccl.trouble}", hint)
        found[who] = python.nccl.version
    told = ", ".join(f"{versions.nccl(number)} in {who} Python" for who, number in found.items())
    if len(set(found.values())) == 1:
        return finding.ok(told)
    judge = finding.error if machine.run is None or machine.run.over_nccl else finding.warning
    way = "with the same versions in both (requirements/gpu.txt), or on one machine set sync.transport=ipc"
    return judge(f"{told}; NCCL refuses ranks of different versions", f"run: {fix(gpu=True)}, {way}")


def cuda(machine: Machine) -> Finding:
    """Check that the torch of trainer and engines can use the GPUs with this driver."""
    if not machine.nvidia.present:
        return finding.absent("no GPU")
    newest, told = machine.trainer.cuda_driver, []
    takes = "libcuda.so.1 cannot be opened" if newest is None else f"the driver takes up to {versions.cuda(newest)}"
    for who, python in machine.pythons:
        torch = python.torch
        if torch is None:
            return finding.absent(f"{who} torch cannot be imported", "see the lines torch and engine-python")
        if torch.cuda is None:
            return finding.error(f"{who} torch {torch.version} is a build for the CPU", f"run: {fix(gpu=True)}")
        if not torch.shown:
            what = f"{who} torch is built for CUDA {torch.cuda}, and {takes}; it sees no GPU in {python.executable}"
            return finding.error(f"{what}: {torch.trouble or 'look at CUDA_VISIBLE_DEVICES'}", _way(torch.cuda, newest))
        told.append(f"{who} torch is built for CUDA {torch.cuda}")
    return finding.ok(f"{', '.join(told)}; {takes}")


def _way(built: str, newest: int | None) -> str:
    """Return the fix for a CUDA build of torch that sees no GPU. An older driver of the same major version suffices."""
    if newest is not None and newest // 1000 < (major := int(built.partition(".")[0])):
        return versions.driver_hint(major)
    return "nvidia-smi and dmesg say more; in a container, start it with GPUs (--gpus all, --nv)"


def _wrong(machine: Machine, where: PythonFacts, name: str) -> str | None:
    """Return what is wrong with a package, or None if it is installed in the declared range."""
    wanted = machine.requirements.get(name, "")
    if name not in where.packages:
        return f"{name} is not installed in {where.executable}"
    return None if versions.within(where.packages[name], wanted) else f"{name} is {where.packages[name]}, and has to be {wanted}"


def _engine(machine: Machine) -> str:
    return fix("engine", gpu=machine.nvidia.present, python=machine.engine_python.executable)
