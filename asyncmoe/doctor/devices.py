"""Checks of GPUs, their links, and InfiniBand."""

from __future__ import annotations

from asyncmoe.doctor import verdict
from asyncmoe.doctor.facts import Machine, Port
from asyncmoe.doctor.verdict import Verdict

CPU_IS_FINE = "there is no GPU; runs on the CPU work without"
_BUILT_FOR = ("9", "10")
"""Major compute capabilities that the extension's kernels are built for unless ASYNCMOE_CUDA_ARCHS is set (setup.py)."""
IN_USE = 0.05
"""Highest share of a GPU's memory that an idle driver may use."""


def driver(machine: Machine) -> Verdict:
    """Check that NVIDIA's driver answers."""
    nvidia = machine.nvidia
    if nvidia.driver is not None:
        return verdict.ok(nvidia.driver)
    if not nvidia.present:
        return verdict.absent(f"{CPU_IS_FINE} ({nvidia.trouble or 'nvidia-smi is silent'})")
    return verdict.error(
        f"{nvidia.on_bus} NVIDIA GPUs on the PCI bus, but no driver answers: {nvidia.trouble}",
        "install or load NVIDIA's driver; in a container, start it with GPUs (--gpus all, --nv)",
    )


def gpus(machine: Machine) -> Verdict:
    """Check that GPUs are present, idle, of one kind, and of an architecture that the kernels are built for."""
    nvidia = machine.nvidia
    if not nvidia.present:
        return verdict.absent(CPU_IS_FINE)
    if not nvidia.gpus:
        return verdict.error("the driver shows none", "see the line driver")
    told = _described(machine)
    if closed := [gpu.index for gpu in nvidia.gpus if gpu.compute_mode == "Prohibited"]:
        return verdict.error(f"{told}; compute mode of {_numbers(closed)} is Prohibited", _compute_mode(closed))
    if used := [gpu.index for gpu in nvidia.gpus if gpu.used_mib > IN_USE * gpu.memory_mib]:
        most = max(gpu.used_mib for gpu in nvidia.gpus)
        return verdict.warning(f"{told}; others use up to {most} MiB of {_numbers(used)}", "see with nvidia-smi whose they are; end them")
    if len({(gpu.name, gpu.memory_mib) for gpu in nvidia.gpus}) > 1:
        return verdict.warning(f"{told}: of different kinds", "the slowest sets the pace: choose alike ones with CUDA_VISIBLE_DEVICES")
    if alone := [gpu.index for gpu in nvidia.gpus if gpu.compute_mode != "Default"]:
        mode = nvidia.gpus[alone[0]].compute_mode
        return verdict.warning(
            f"{told}; compute mode of {_numbers(alone)} is {mode}: no two processes share one, so sync.transport ipc fails",
            _compute_mode(alone),
        )
    other = sorted({gpu.capability for gpu in nvidia.gpus if gpu.capability.split(".")[0] not in _BUILT_FOR})
    if other:
        archs = ";".join(version.replace(".", "") for version in other)
        return verdict.warning(
            f"{told}; compute capability {', '.join(other)} is not among those the kernels are built for by default (9, 10)",
            f'if it was not done: ASYNCMOE_CUDA_ARCHS="{archs}" when the extension is built',
        )
    return verdict.ok(told)


def nvlink(machine: Machine) -> Verdict:
    """Check that NVLink connects every pair of GPUs."""
    nvidia = machine.nvidia
    if not nvidia.present:
        return verdict.absent(CPU_IS_FINE)
    if len(nvidia.gpus) < 2:
        return verdict.absent("fewer than two GPUs")
    if not nvidia.links:
        return verdict.warning("nvidia-smi topo -m does not say how GPUs are linked", "run it by hand; in a container it may need rights")
    pairs = {(i, j): nvidia.links[i][j] for i in range(len(nvidia.links)) for j in range(i)}
    slow = {pair: link for pair, link in pairs.items() if not link.startswith("NV")}
    if not slow:
        return verdict.ok(f"{', '.join(sorted(set(pairs.values())))} between all {len(nvidia.links)} GPUs")
    (i, j), link = next(iter(slow.items()))
    return verdict.warning(
        f"{len(slow)} of {len(pairs)} pairs of GPUs have no NVLink, e.g. {j} and {i}: {link}",
        "keep tensor parallelism within GPUs that have it; if all should, look at nvidia-smi nvlink --status and the fabric manager",
    )


def infiniband(machine: Machine) -> Verdict:
    """Check that adapters are up and reach GPU memory."""
    ports = machine.fabric.ports
    if not ports:
        return verdict.absent("no adapter; several machines would talk over TCP")
    up = [port for port in ports if port.state == "ACTIVE"]
    told = f"{len(up)} of {len(ports)} ports are up ({', '.join(sorted({f'{port.rate}, {port.link_layer}' for port in up})) or 'none'})"
    if not up:
        return verdict.warning(told, "look at ibstat and the cables, or set NCCL_IB_DISABLE=1 to talk over TCP")
    if down := [port for port in ports if port.state != "ACTIVE"]:
        named = ", ".join(f"{_port(port)} is {port.state}" for port in down)
        return verdict.warning(
            f"{told}: {named}", f"if they should be: ibstat; else set NCCL_IB_HCA={','.join(_port(port) for port in up)}"
        )
    if machine.nvidia.present and not machine.fabric.peer_memory:
        return verdict.warning(
            f"{told}; nvidia_peermem is not loaded: messages may go through host memory",
            "modprobe nvidia_peermem; not needed where the open driver's dma-buf is used (NCCL_DEBUG=INFO says GDR 1)",
        )
    return verdict.ok(told)


def _described(machine: Machine) -> str:
    """Describe the GPUs as `8 x NVIDIA H100 80GB HBM3 of 81559 MiB`, with the number that torch sees if that differs."""
    kinds: dict[tuple[str, int], int] = {}
    for gpu in machine.nvidia.gpus:
        kinds[gpu.name, gpu.memory_mib] = kinds.get((gpu.name, gpu.memory_mib), 0) + 1
    told = ", ".join(f"{count} x {name} of {memory} MiB" for (name, memory), count in kinds.items())
    if any(gpu.mig for gpu in machine.nvidia.gpus):
        told += ", cut into MIG instances"
    seen = machine.trainer.torch.devices if machine.trainer.torch is not None and machine.trainer.torch.cuda else None
    return told if seen in (None, len(machine.nvidia.gpus)) else f"{told}, of which torch sees {seen}"


def _compute_mode(indices: list[int]) -> str:
    return f"nvidia-smi -i {','.join(map(str, indices))} -c DEFAULT (as root)"


def _numbers(indices: list[int]) -> str:
    return ("GPU " if len(indices) == 1 else "GPUs ") + ", ".join(map(str, indices))


def _port(port: Port) -> str:
    return f"{port.device}:{port.number}"
