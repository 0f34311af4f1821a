"""Checks of compiled components: asyncmoe's extension, NCCL, and the CUDA version of torch."""

from __future__ import annotations

from asyncmoe.config.transports import TRANSPORTS, either
from asyncmoe.doctor import finding, versions
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.finding import Finding
from asyncmoe.installed import fix, rebuild, rebuild_with_kernels


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
        if python.nccl is None or python.nccl.version is None:
            why = python.nccl.trouble if python.nccl is not None else "it cannot be opened without asyncmoe's extension"
            hint = f"run: {fix(gpu=True)}, or put the directory of libnccl.so.2 on LD_LIBRARY_PATH"
            return finding.error(f"{who} Python: {why}", hint)
        found[who] = python.nccl.version
    told = ", ".join(f"{versions.nccl(number)} in {who} Python" for who, number in found.items())
    if len(set(found.values())) == 1:
        return finding.ok(told)
    judge = finding.error if machine.run is None or machine.run.over_nccl else finding.warning
    way = "the same versions in both (requirements/gpu.txt); on one machine take sync.transport: ipc"
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
    """What to do about a torch of a CUDA version that sees no GPU. An older driver of the same major version suffices."""
    if newest is not None and newest // 1000 < (major := int(built.partition(".")[0])):
        return versions.driver_hint(major)
    return "nvidia-smi and dmesg say more; in a container, start it with GPUs (--gpus all, --nv)"
