"""The GPUs that the run's processes see, by CUDA's numbers, and which of them the run takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncmoe.config.devices import Devices, Wanted, place
from asyncmoe.doctor.facts import GpuFacts, Machine, Nvidia, Shown, Torch
from asyncmoe.errors import ConfigError

_MIB = 1 << 20
IN_USE = 0.05
"""Share of a GPU's memory that an idle driver may take."""


@dataclass(frozen=True)
class GpuCard:
    """A GPU, or a MIG instance of a GPU, as CUDA shows it to a process.

    Attributes:
        number: CUDA's, from 0 on.
        index: nvidia-smi's number; None: it does not list it, as an instance.
        memory_bytes: all of it; None: neither nvidia-smi nor torch says.
        capability: e.g. (9, 0); None: neither says.
        used_mib: what other processes use, where it is more than an idle driver takes; else 0. Of an instance it is not told.
        compute_mode: Default, Exclusive_Process or Prohibited.
    """

    number: int
    index: int | None = None
    name: str = ""
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    used_mib: int = 0
    compute_mode: str = "Default"

    @property
    def label(self) -> str:
        """`1`, and nvidia-smi's number where it is another: `1 (nvidia-smi: 6)`."""
        return str(self.number) if self.index in (None, self.number) else f"{self.number} (nvidia-smi: {self.index})"

    @property
    def kind(self) -> str:
        """Name and memory, as far as they are known."""
        return self.name if not self.memory_bytes else f"{self.name} of {self.memory_bytes // _MIB} MiB"


def labelled(cards: Iterable[GpuCard]) -> str:
    """`GPU 0`, `GPUs 0, 1 (nvidia-smi: 6)`."""
    labels = [card.label for card in cards]
    return ("GPU " if len(labels) == 1 else "GPUs ") + ", ".join(labels)


def kinds(group: Iterable[GpuCard]) -> tuple[str, ...]:
    """The kinds of cards."""
    return tuple(sorted({card.kind for card in group}))


def cards(nvidia: Nvidia, torch: Torch | None) -> tuple[GpuCard, ...]:
    """The GPUs that CUDA shows, in its order, which is not nvidia-smi's where they differ: unique ids tell which is which.

    Args:
        torch: None: it has not been asked; then CUDA shows what CUDA_VISIBLE_DEVICES leaves of nvidia-smi's list.
    """
    if torch is None:
        return tuple(_card(number, gpu, None) for number, gpu in enumerate(nvidia.visible))
    by_id = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in nvidia.gpus}
    return tuple(_card(number, by_id.get(shown.uuid), shown) for number, shown in enumerate(torch.shown))


def _card(number: int, gpu: GpuFacts | None, shown: Shown | None) -> GpuCard:
    mib = gpu.memory_mib if gpu is not None and not gpu.mig else 0
    memory = mib * _MIB or (shown.memory_bytes if shown is not None else None) or None
    name = shown.name if shown is not None else gpu.name if gpu is not None else ""
    major, _, minor = (shown.capability if shown is not None else gpu.capability if gpu is not None else "").partition(".")
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    if gpu is None:
        return GpuCard(number, None, name, memory, capability)
    used = gpu.used_mib if gpu.used_mib > IN_USE * mib > 0 else 0
    return GpuCard(number, gpu.index, name, memory, capability, used, gpu.compute_mode)


def of(machine: Machine) -> tuple[GpuCard, ...]:
    """The GPUs that the trainer's Python sees."""
    return cards(machine.nvidia, machine.trainer.torch) if machine.trainer.torch is not None else ()


def taken(machine: Machine) -> tuple[tuple[Wanted, Devices], ...]:
    """What the configuration puts on this machine and the GPUs it takes, for each part that finds its GPUs."""
    found = []
    for wanted in machine.run.wanted if machine.run is not None else ():
        try:
            found.append((wanted, place(wanted, len(of(machine)))))
        except ConfigError:
            continue
    return tuple(found)


def hidden(nvidia: Nvidia, count: int) -> int:
    """GPUs that CUDA_VISIBLE_DEVICES keeps from a process that sees `count`."""
    return max(0, len(nvidia.gpus) - count) if nvidia.chosen is not None else 0


def smallest(of_group: Sequence[GpuCard]) -> GpuCard | None:
    """The card with the least memory, of those whose memory is known."""
    return min((card for card in of_group if card.memory_bytes), key=lambda card: card.memory_bytes or 0, default=None)
