"""The GPUs that the run's processes see, by CUDA's numbers, and which of them the run takes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from asyncmoe.config.devices import Devices, Wanted, named, place
from asyncmoe.doctor.facts import GpuFacts, Machine, Nvidia, Torch
from asyncmoe.errors import ConfigError


def labelled(cards: Iterable[GpuFacts]) -> str:
    """Format as `GPU 0` or `GPUs 0, 1 (nvidia-smi: 6)`."""
    return named([card.label for card in cards])


def kinds(group: Iterable[GpuFacts]) -> tuple[str, ...]:
    """Return the kinds of cards: name and memory, where known."""
    return tuple(sorted({card.name + (f" of {card.memory_mib} MiB" if card.memory_mib else "") for card in group}))


def cards(nvidia: Nvidia, torch: Torch | None) -> tuple[GpuFacts, ...]:
    """Return the GPUs that CUDA shows, in its order, which may differ from nvidia-smi's; GPUs are matched by their unique ids.

    Args:
        torch: torch's facts; None if torch was not asked. Then the result is the part of nvidia-smi's list that CUDA_VISIBLE_DEVICES
            selects.
    """
    if torch is None:
        return tuple(_card(number, gpu, None) for number, gpu in enumerate(nvidia.visible))
    by_id = {gpu.uuid: gpu for gpu in nvidia.gpus}
    return tuple(_card(number, by_id.get(shown.uuid, shown), shown) for number, shown in enumerate(torch.shown))


def _card(number: int, gpu: GpuFacts, shown: GpuFacts | None) -> GpuFacts:
    """Merge nvidia-smi's facts about a GPU with torch's; if the GPU is cut into instances, a process has less memory than nvidia-smi
    shows."""
    told = replace(gpu, number=number, memory_mib=0, used_mib=0) if gpu.mig else replace(gpu, number=number)
    if shown is None:
        return told
    return replace(told, name=shown.name, capability=shown.capability, memory_mib=told.memory_mib or shown.memory_mib)


def of(machine: Machine) -> tuple[GpuFacts, ...]:
    """Return the GPUs that the trainer's Python sees."""
    return cards(machine.nvidia, machine.trainer.torch) if machine.trainer.torch is not None else ()


def taken(machine: Machine) -> tuple[tuple[Wanted, Devices], ...]:
    """Return the configuration's demands on this machine and the GPUs they take, for each demand that can be met."""
    found = []
    for wanted in machine.run.wanted if machine.run is not None else ():
        with suppress(ConfigError):
            found.append((wanted, place(wanted, len(of(machine)))))
    return tuple(found)


def hidden(nvidia: Nvidia, count: int) -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES hides from a process that sees `count`."""
    return max(0, len(nvidia.gpus) - count) if nvidia.chosen is not None else 0
