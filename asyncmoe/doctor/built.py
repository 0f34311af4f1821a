"""Checks of compiled components: asyncmoe's extension, NCCL, and the CUDA version of torch."""

from __future__ import annotations

from asyncmoe.config.transports import TRANSPORTS, either
from asyncmoe.doctor import verdict, versions
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.python_facts import PythonFacts
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.installed import fix, rebuild, rebuild_with_kernels


def extension(machine: Machine) -> Verdict:
    """Check that the extension imports, was built from the current sources, and has CUDA kernels on a machine with GPUs."""
    found = machine.trainer.extension
    if found is None or found.package is None:
        return verdict.error(f"{machine.trainer.executable} does not find asyncmoe", f"run: {fix()}")
    if found.trouble is not None:
        return verdict.error(f"cannot be imported: {found.trouble}", rebuild())
    if machine.nvidia.present and not found.cuda:
        return verdict.error("built without CUDA kernels, on a machine with GPUs", rebuild_with_kernels())
    kernels = "with CUDA kernels" if found.cuda else "without CUDA kernels, as there is no GPU"
    if machine.sources and found.built_from != machine.sources:
        return verdict.error(f"{kernels}, but built from other sources than those in csrc", rebuild())
    return verdict.ok(kernels + (", built from the sources in csrc" if machine.sources else ""))


def nccl(machine: Machine) -> Verdict:
    """Check that trainer and engines open the same NCCL version, because NCCL refuses a communicator of two versions."""
    sides = [(f"{who} Python", side) for who, side in _sides(machine)]
    versions_of = {who: side.nccl.version for who, side in sides if side.nccl is not None and side.nccl.version is not None}
    missing = [f"{who}: {_why_no_nccl(side)}" for who, side in sides if who not in versions_of]
    if not machine.nvidia.present:
        there = ", ".join(f"{versions.nccl(number)} in {who}" for who, number in versions_of.items())
        between_cpus = either([name for name, one in TRANSPORTS.items() if not one.gpu])
        return verdict.absent(f"no GPU; weights go over {between_cpus}{f' ({there})' if there else ''}")
    if missing:
        hint = f"run: {fix(gpu=True)}, or put the directory of libnccl.so.2 on LD_LIBRARY_PATH"
        return verdict.error("; ".join(missing), hint)
    if len(set(versions_of.values())) > 1:
        told = ", ".join(f"{versions.nccl(number)} in {who}" for who, number in versions_of.items())
        over_nccl = machine.run is None or machine.run.on_gpus is None or TRANSPORTS[machine.run.on_gpus.way].nccl
        judge = verdict.error if over_nccl else verdict.warning
        return judge(
            f"{told}; NCCL refuses ranks of different versions",
            f"run: {fix(gpu=True)}, the same versions in both (requirements/gpu.txt); on one machine take sync.transport: ipc",
        )
    library = machine.trainer.nccl
    return verdict.ok(f"{versions.nccl(next(iter(versions_of.values())))} ({library.library if library else ''})")


def cuda(machine: Machine) -> Verdict:
    """Check that the torch of trainer and engines can use the GPUs with this driver."""
    if not machine.nvidia.present:
        return verdict.absent(f"no GPU; torch {_builds(machine)}")
    newest = machine.trainer.cuda_driver
    if newest is None:
        return verdict.error(
            "libcuda.so.1 cannot be opened", "install NVIDIA's driver; in a container, start it with GPUs (--gpus all, --nv)"
        )
    judged = [_suits(who, side, newest) for who, side in _sides(machine)]
    judged += [refusal for refusal in [_blind(machine)] if refusal is not None]
    for state in ("error", "warning"):
        if bad := next((found for found in judged if found.state == state), None):
            return bad
    return verdict.ok(f"torch {_builds(machine)}; the driver takes up to CUDA {versions.cuda(newest)}")


def _blind(machine: Machine) -> Verdict | None:
    """The refusal of a Python whose torch sees no GPU where the other's sees some."""
    trainer, engine = machine.trainer, machine.engine_python
    if trainer.torch is None or engine.torch is None or not (trainer.torch.cuda and engine.torch.cuda):
        return None
    counts = {"the trainer's": (trainer, trainer.torch, engine.torch), "the engines'": (engine, engine.torch, trainer.torch)}
    for who, (side, own, other) in counts.items():
        if not own.devices and other.devices and own.trouble is None:
            return verdict.error(
                f"the torch {own.version} of {who} Python, {side.executable}, sees no GPU",
                f"{side.executable} -c 'import torch; torch.cuda.init()' says why; or run: {fix(gpu=True)}",
                f"{other.devices}, as the other Python's sees",
            )
    return None


def _suits(who: str, side: PythonFacts, newest: int) -> Verdict:
    """Judge a torch by the driver's newest CUDA. Within a major version an older driver suffices (CUDA's minor-version compatibility)."""
    if side.torch is None:
        return verdict.warning(f"unknown: {who} torch cannot be imported", "see the lines torch and engine-python")
    if side.torch.cuda is None:
        return verdict.error(f"{who} torch {side.torch.version} is a build for the CPU", f"run: {fix(gpu=True)}")
    built, driver = versions.cuda_number(side.torch.cuda), versions.cuda(newest)
    told = f"{who} torch is built for CUDA {side.torch.cuda}, the driver takes up to {driver}"
    if built // 1000 > newest // 1000 and not side.torch.devices:
        return verdict.error(told, versions.driver_hint(built // 1000))
    if side.torch.trouble is not None:
        return verdict.error(f"{who} torch cannot use the GPUs: {side.torch.trouble}", "mend that first; nvidia-smi and dmesg say more")
    if built > newest:
        return verdict.warning(f"{told}: kernels compiled at run time may fail", "update NVIDIA's driver")
    return verdict.ok(told)


def _sides(machine: Machine) -> list[tuple[str, PythonFacts]]:
    return [("the trainer's", machine.trainer), *([("the engines'", machine.engine)] if machine.engine is not None else [])]


def _builds(machine: Machine) -> str:
    told = []
    for who, side in _sides(machine):
        build = (
            "is unknown" if side.torch is None else f"is built for CUDA {side.torch.cuda}" if side.torch.cuda else "is built for the CPU"
        )
        told.append(f"of {who} Python {build}")
    return ", ".join(told)


def _why_no_nccl(side: PythonFacts) -> str:
    if side.nccl is None:
        return "it cannot be opened without asyncmoe's extension"
    return side.nccl.trouble or "unusable"
