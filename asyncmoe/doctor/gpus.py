"""Check the GPUs themselves: they are free, alike, and of a kind that the kernels are built for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from asyncmoe.doctor import cards, finding
from asyncmoe.doctor.cards import labelled
from asyncmoe.doctor.facts import GpuFacts, Machine
from asyncmoe.doctor.finding import Finding, State
from asyncmoe.installed import rebuild

NO_GPU = "there is no GPU; runs on CPUs need none"
_OLDEST = (7, 5)
"""The oldest compute capability that CUDA 13 compiles for (CUDA Toolkit 13.0 release notes: Maxwell, Pascal and Volta are dropped)."""
_BFLOAT16 = (8, 0)
"""The oldest capability with bfloat16 in its matrix units (CUDA C++ Programming Guide, "Compute Capabilities")."""


def gpus(machine: Machine) -> Finding:
    """Check the driver and the GPUs that the run takes, or without a configuration those that CUDA shows."""
    nvidia = machine.nvidia
    if not nvidia.present:
        return finding.absent(NO_GPU)
    if not nvidia.gpus:
        what = f"{nvidia.on_bus} NVIDIA GPUs on the PCI bus, but no driver answers: {nvidia.trouble}"
        return finding.error(what, "install or load NVIDIA's driver; in a container, start it with GPUs (--gpus all, --nv)")
    shown = cards.of(machine) or cards.cards(nvidia, None)
    numbers = {number for _, devices in cards.taken(machine) for number in devices.taken}
    there = tuple(card for card in shown if card.number in numbers) or shown
    faults = [*_without_kernels(machine, there), *_disturbed(machine, there)]
    told = _described(machine)
    if errors := [fault for fault in faults if fault.state == "error"]:
        return replace(errors[0], found=f"{told}; {errors[0].found}")
    if faults:
        return finding.warning("; ".join([told, *(fault.found for fault in faults)]), "; ".join(fault.hint or "" for fault in faults))
    return finding.ok(told)


def _disturbed(machine: Machine, there: Sequence[GpuFacts]) -> Iterator[Finding]:
    """Yield findings about what keeps processes off these GPUs or slows them down; they are errors if the run takes the GPUs."""
    taken = cards.taken(machine)
    state: State = "error" if taken else "warning"
    if closed := [card for card in there if card.compute_mode == "Prohibited"]:
        yield Finding(state, f"compute mode of {labelled(closed)} is Prohibited", _compute_mode(closed), "Default")
    shared = {number for _, devices in taken for number in devices.shared}
    if alone := [card for card in there if card.compute_mode == "Exclusive_Process" and card.number in shared]:
        what = f"compute mode of {labelled(alone)} is Exclusive_Process, and the trainer and an engine use {labelled(alone)} in turn"
        yield Finding(state, what, _compute_mode(alone), "a GPU that two processes can use")
    if used := [card for card in there if card.busy]:
        what = f"other processes use up to {max(card.used_mib for card in used)} MiB of {labelled(used)}"
        hint = "nvidia-smi lists them; end them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield Finding(state, what, hint, "GPUs that no other process uses")
    groups = [("a run", there)] if not taken else []
    for _, devices in taken:
        groups.append(("the trainer", [card for card in there if card.number in devices.trainer]))
        groups += [(f"engine {i}", [card for card in there if card.number in one]) for i, one in enumerate(devices.engines)]
    for who, group in groups:
        if len(kinds := cards.kinds(group)) > 1:
            hint = "choose GPUs of one kind with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER=PCI_BUS_ID"
            yield Finding(state, f"{who} would compute on {' and '.join(kinds)}", hint, "GPUs of one kind in a group")


def _without_kernels(machine: Machine, there: Sequence[GpuFacts]) -> Iterator[Finding]:
    """Yield findings about GPUs that are too old for any build, or for which this build lacks kernels."""
    known = [(card, card.generation) for card in there if card.generation is not None]
    needed, run = _OLDEST, machine.run
    if run is not None and (run.engine_dtype == "bfloat16" or not run.trainer_float32):
        needed = _BFLOAT16
    if old := [one for one in known if one[1] < needed]:
        why = "bfloat16 needs (CUDA 13 alone needs 7.5)" if needed == _BFLOAT16 else "CUDA 13 needs"
        hint = "choose newer GPUs with CUDA_VISIBLE_DEVICES, or another machine"
        yield finding.error(_of_capability(old), hint, f"{needed[0]}.{needed[1]} or higher, as {why}")
    built = machine.trainer.extension.architectures if machine.trainer.extension is not None else ()
    if built and (other := [one for one in known if not _runs(built, one[1])]):
        archs = ";".join(sorted({f"{major}{minor}" for _, (major, minor) in known}, key=int))
        expected = f"one of {', '.join(f'{arch[:-1]}.{arch[-1]}' for arch in built)}, or a higher minor version of the same major one"
        what = f"{_of_capability(other)}, for which the extension's kernels are not built"
        yield finding.error(what, rebuild(gpu=True, archs=archs), expected)


def _runs(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a build runs on a capability: the one it was built for, or a later one of the same major number (CUDA C++ Programming
    Guide, "Binary Compatibility"); nothing is compiled at run time."""
    return any(int(arch[:-1]) == capability[0] and int(arch[-1]) <= capability[1] for arch in built)


def _of_capability(group: Sequence[tuple[GpuFacts, tuple[int, int]]]) -> str:
    versions = sorted({capability for _, capability in group})
    return f"{labelled(card for card, _ in group)} of compute capability {', '.join(f'{major}.{minor}' for major, minor in versions)}"


def _described(machine: Machine) -> str:
    """Describe the GPUs as `8 x NVIDIA H100 80GB HBM3 of 81559 MiB`, with the number that torch sees if that differs, and the driver."""
    listed = [(gpu.name, gpu.memory_mib) for gpu in machine.nvidia.gpus]
    told = ", ".join(f"{listed.count(kind)} x {kind[0]}" + (f" of {kind[1]} MiB" if kind[1] else "") for kind in dict.fromkeys(listed))
    if any(gpu.mig for gpu in machine.nvidia.gpus):
        told += ", cut into MIG instances, of which CUDA shows a process only one"
    if (torch := machine.trainer.torch) is not None and torch.cuda and len(torch.shown) != len(listed):
        told += f", of which torch sees {len(torch.shown)}"
    return f"{told}, driver {machine.nvidia.driver}"


def _compute_mode(closed: Sequence[GpuFacts]) -> str:
    return f"nvidia-smi -i {','.join(str(card.index) for card in closed)} -c DEFAULT (as root)"
