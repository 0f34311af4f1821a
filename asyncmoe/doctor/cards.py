"""The GPUs that the run's processes see, by CUDA's numbers, and which of them the run takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncmoe.config.devices import Devices, Wanted, place
from asyncmoe.doctor.facts import GpuFacts, Machine, Nvidia
from asyncmoe.doctor.python_facts import Torch
from asyncmoe.errors import ConfigError

_MIB = 1 << 20
IN_USE = 0.05
"""Share of a GPU's memory that an idle driver may take."""
_INSTANCE = "MIG-"


@dataclass(frozen=True)
class GpuCard:
    """A GPU, or an instance of a GPU, as CUDA shows it to a process.

    Attributes:
        number: CUDA's, from 0 on.
        gpu: its line of nvidia-smi; None: which line it is cannot be told.
        memory_bytes: all of it; None: neither nvidia-smi nor torch says.
        capability: e.g. "9.0"; None: neither says.
        instance: it is a MIG instance.
    """

    number: int
    gpu: GpuFacts | None = None
    memory_bytes: int | None = None
    capability: str | None = None
    instance: bool = False

    @property
    def label(self) -> str:
        """`1`, and nvidia-smi's number where it is another: `1 (nvidia-smi: 6)`."""
        other = self.gpu is not None and self.gpu.index != self.number
        return f"{self.number} (nvidia-smi: {self.gpu.index})" if self.gpu is not None and other else str(self.number)

    @property
    def kind(self) -> str:
        """Name and memory, as far as they are known."""
        name = self.gpu.name if self.gpu is not None else f"a GPU of compute capability {self.capability or 'unknown'}"
        return name if not self.memory_bytes else f"{name} of {self.memory_bytes // _MIB} MiB"

    @property
    def used_mib(self) -> int:
        """What other processes use, where it is more than an idle driver takes; else 0. Of an instance it is not told."""
        if self.gpu is None or self.instance or not self.memory_bytes:
            return 0
        return self.gpu.used_mib if self.gpu.used_mib * _MIB > IN_USE * self.memory_bytes else 0


def labelled(cards: Iterable[GpuCard]) -> str:
    """`GPU 0`, `GPUs 0, 1 (nvidia-smi: 6)`."""
    labels = [card.label for card in cards]
    return ("GPU " if len(labels) == 1 else "GPUs ") + ", ".join(labels)


def kinds(group: Iterable[GpuCard]) -> tuple[str, ...]:
    """The kinds of cards, as far as nvidia-smi tells them: a card whose memory is not known is of every kind with its name."""
    found: dict[str, dict[int, str]] = {}
    for card in group:
        if card.gpu is not None:
            found.setdefault(card.gpu.name, {})[card.memory_bytes or 0] = card.kind
    return tuple(sorted(kind for sizes in found.values() for nbytes, kind in sizes.items() if nbytes or len(sizes) == 1))


def smi_numbers(cards: Iterable[GpuCard]) -> str:
    """Numbers that `nvidia-smi -i` takes."""
    return ",".join(str(card.gpu.index if card.gpu is not None else card.number) for card in cards)


def seen(machine: Machine) -> int:
    """GPUs that torch shows a process."""
    torch = machine.trainer.torch
    return torch.devices if torch is not None else 0


def cards(nvidia: Nvidia, torch: Torch | None) -> tuple[GpuCard, ...]:
    """The GPUs that CUDA shows, in its order.

    torch's unique ids decide which line of nvidia-smi a GPU has. Without them it is the place in the list, where both lists are equally
    long: CUDA's order is nvidia-smi's among cards of one kind, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        torch: None: it has not been asked; then CUDA shows what CUDA_VISIBLE_DEVICES leaves of nvidia-smi's list.
    """
    visible = nvidia.visible
    count = torch.devices if torch is not None else len(visible)
    listed = visible if len(visible) == count else ()
    shown = torch.shown if torch is not None and len(torch.shown) == count else ()
    by_id = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in nvidia.gpus if gpu.uuid}
    alone = any(entry.startswith(_INSTANCE) for entry in nvidia.chosen or ()) or (count == 1 and any(gpu.mig for gpu in visible))
    # Of a GPU whose line is not known: what all lines say.
    common_mib, common_version = {gpu.memory_mib for gpu in visible}, {gpu.capability for gpu in visible}
    found = []
    for number in range(count):
        asked = shown[number] if shown else None
        gpu = by_id.get(asked.uuid) if asked is not None and asked.uuid else listed[number] if listed else None
        instance = gpu.mig if gpu is not None else alone
        mib = 0 if instance else gpu.memory_mib if gpu is not None else min(common_mib) if len(common_mib) == 1 else 0
        memory = mib * _MIB or (asked.memory_bytes if asked is not None else 0) or None
        version = gpu.capability if gpu is not None else min(common_version) if len(common_version) == 1 else ""
        told = (asked.capability if asked is not None else "", version)
        capability = next((version for version in told if _is_capability(version)), None)
        found.append(GpuCard(number, gpu, memory, capability, instance))
    return tuple(found)


def of(machine: Machine) -> tuple[GpuCard, ...]:
    """The GPUs that the trainer's Python sees."""
    return cards(machine.nvidia, machine.trainer.torch)


def taken(machine: Machine) -> tuple[tuple[Wanted, Devices], ...]:
    """What the configuration puts on this machine and the GPUs it takes, for each part that finds its GPUs."""
    run = machine.run
    if run is None or run.on_gpus is None:
        return ()
    found = []
    for wanted in run.on_gpus.places:
        try:
            found.append((wanted, place(wanted, seen(machine))))
        except ConfigError:
            continue
    return tuple(found)


def hidden(nvidia: Nvidia, count: int) -> int:
    """GPUs that CUDA_VISIBLE_DEVICES keeps from a process that sees `count`."""
    return max(0, len(nvidia.gpus) - count) if nvidia.chosen is not None else 0


def smallest(of_group: Sequence[GpuCard]) -> GpuCard | None:
    """The card with the least memory, of those whose memory is known."""
    return min((card for card in of_group if card.memory_bytes), key=lambda card: card.memory_bytes or 0, default=None)


def _is_capability(version: str) -> bool:
    major, _, minor = version.partition(".")
    return major.isdigit() and minor.isdigit()
