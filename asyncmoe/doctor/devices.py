"""Checks of GPUs, the kernels and data types that run on them, their links, and InfiniBand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from asyncmoe.doctor import cards, verdict
from asyncmoe.doctor.cards import GpuCard, labelled
from asyncmoe.doctor.facts import Machine, Port
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.installed import rebuild

CPU_IS_FINE = "there is no GPU; runs on the CPU work without"
_OLDEST = (7, 5)
"""The oldest compute capability that CUDA 13 compiles for (CUDA Toolkit 13.0 release notes: Maxwell, Pascal and Volta are dropped)."""
_BFLOAT16 = (8, 0)
"""The oldest with bfloat16 in its matrix units (CUDA C++ Programming Guide, "Compute Capabilities")."""


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
    """Those that the run takes, or without a configuration those that CUDA shows: free, alike, and of a kind the kernels are built for."""
    nvidia = machine.nvidia
    if not nvidia.present:
        return verdict.absent(CPU_IS_FINE)
    if not nvidia.gpus:
        return verdict.error("the driver shows none", "see the line driver")
    told, there = _described(machine), _there(machine)
    for refusal in (*_closed(machine, there), *_without_kernels(machine, there)):
        return replace(refusal, found=f"{told}; {refusal.found}")
    if warnings := [*_disturbing(machine, there)]:
        return verdict.warning("; ".join([told, *(one.found for one in warnings)]), "; ".join(one.hint or "" for one in warnings))
    return verdict.ok(told)


def _there(machine: Machine) -> tuple[GpuCard, ...]:
    """The GPUs that matter: those the run takes, else those CUDA shows, else all that nvidia-smi lists."""
    shown = cards.of(machine) or cards.cards(machine.nvidia, None)
    taken = {number for _, devices in cards.taken(machine) for number in devices.taken}
    return tuple(card for card in shown if card.number in taken) or shown


def _closed(machine: Machine, there: Sequence[GpuCard]) -> Iterator[Verdict]:
    """Compute modes that keep the run's processes off a GPU."""
    if not cards.taken(machine):
        return
    if closed := _in_mode(there, "Prohibited"):
        yield verdict.error(f"compute mode of {labelled(closed)} is Prohibited", _compute_mode(closed), "Default")
    shared = {number for _, devices in cards.taken(machine) for number in devices.shared}
    if alone := [card for card in _in_mode(there, "Exclusive_Process") if card.number in shared]:
        yield verdict.error(
            f"compute mode of {labelled(alone)} is Exclusive_Process, and the trainer and an engine share {labelled(alone)}",
            _compute_mode(alone),
            "a GPU that takes two processes",
        )


def _disturbing(machine: Machine, there: Sequence[GpuCard]) -> Iterator[Verdict]:
    """What does not stop a run on these GPUs, or only some runs."""
    if not cards.taken(machine) and (closed := _in_mode(there, "Prohibited")):
        yield verdict.warning(f"compute mode of {labelled(closed)} is Prohibited: no run can take it", _compute_mode(closed))
    if not cards.taken(machine) and (alone := _in_mode(there, "Exclusive_Process")):
        yield verdict.warning(
            f"compute mode of {labelled(alone)} is Exclusive_Process: runs with engines.share_gpus=true fail there", _compute_mode(alone)
        )
    if used := [card for card in there if card.used_mib]:
        most = max(card.used_mib for card in used)
        yield verdict.warning(f"others use up to {most} MiB of {labelled(used)}", "see with nvidia-smi whose they are; end them")
    if len(cards.kinds(there)) > 1:
        yield verdict.warning("of different kinds", "the slowest sets the pace: choose alike ones with CUDA_VISIBLE_DEVICES")


def _in_mode(there: Sequence[GpuCard], mode: str) -> list[GpuCard]:
    return [card for card in there if card.gpu is not None and card.gpu.compute_mode == mode]


def _without_kernels(machine: Machine, there: Sequence[GpuCard]) -> Iterator[Verdict]:
    """What no build, or not the one that is there, can run on these GPUs."""
    known = [(card, capability) for card in there if (capability := _numbers(card))]
    asked = machine.run.on_gpus if machine.run is not None else None
    needed = _BFLOAT16 if asked is not None and asked.bfloat16 else _OLDEST
    if old := [card for card, capability in known if capability < needed]:
        why = "bfloat16 needs (and CUDA 13 compiles for none before 7.5)" if needed == _BFLOAT16 else "CUDA 13 compiles for none before"
        yield verdict.error(
            f"{labelled(old)} of compute capability {', '.join(_versions(old))}",
            "choose newer GPUs with CUDA_VISIBLE_DEVICES, or another machine",
            f"{needed[0]}.{needed[1]} or higher, as {why}",
        )
    built = machine.trainer.extension.architectures if machine.trainer.extension is not None else ()
    if built and (other := [card for card, capability in known if not _runs(built, capability)]):
        yield verdict.error(
            f"{labelled(other)} of compute capability {', '.join(_versions(other))}, for which the extension's kernels are not built",
            _rebuild(there),
            f"one of {', '.join(map(_version, built))}, or of the same major number and a higher minor one",
        )


def _runs(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Machine code runs on its own capability and on later ones of the same major number (CUDA C++ Programming Guide, "Binary
    Compatibility"); none of the build is compiled at run time."""
    return any(int(arch[:-1]) == capability[0] and int(arch[-1]) <= capability[1] for arch in built)


def _rebuild(there: Sequence[GpuCard]) -> str:
    """The command that builds for all of these GPUs, not only for those that lack kernels."""
    archs = ";".join(version.replace(".", "") for version in _versions(there))
    return rebuild(gpu=True, archs=archs)


def _versions(there: Sequence[GpuCard]) -> list[str]:
    known = {numbers for card in there if (numbers := _numbers(card))}
    return [f"{major}.{minor}" for major, minor in sorted(known)]


def _version(arch: str) -> str:
    return f"{arch[:-1]}.{arch[-1]}"


def _numbers(card: GpuCard) -> tuple[int, int] | None:
    if card.capability is None:
        return None
    major, _, minor = card.capability.partition(".")
    return int(major), int(minor)


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
    told = ", ".join(f"{count} x {name}" + (f" of {memory} MiB" if memory else "") for (name, memory), count in kinds.items())
    if any(gpu.mig for gpu in machine.nvidia.gpus):
        told += ", cut into MIG instances"
    seen = machine.trainer.torch.devices if machine.trainer.torch is not None and machine.trainer.torch.cuda else None
    return told if seen in (None, len(machine.nvidia.gpus)) else f"{told}, of which torch sees {seen}"


def _compute_mode(closed: Sequence[GpuCard]) -> str:
    return f"nvidia-smi -i {cards.smi_numbers(closed)} -c DEFAULT (as root)"


def _port(port: Port) -> str:
    return f"{port.device}:{port.number}"
