"""Whether the extension's kernels, and bfloat16, run on the GPUs that the run takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncmoe.build import ARCHS
from asyncmoe.doctor import verdict
from asyncmoe.doctor.built import REBUILD
from asyncmoe.doctor.cards import Card, labelled
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.verdict import Verdict

_OLDEST = (7, 5)
"""The oldest compute capability that CUDA 13 compiles for (CUDA Toolkit 13.0 release notes: Maxwell, Pascal and Volta are dropped)."""
_BFLOAT16 = (8, 0)
"""The oldest with bfloat16 in its matrix units (CUDA C++ Programming Guide, "Compute Capabilities")."""


def refusals(machine: Machine, there: Sequence[Card]) -> Iterator[Verdict]:
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
    built = _built(machine)
    if built and (other := [card for card, capability in known if not _runs(built, capability)]):
        yield verdict.error(
            f"{labelled(other)} of compute capability {', '.join(_versions(other))}, for which the extension's kernels are not built",
            _rebuild(there),
            f"one of {', '.join(map(_version, built))}, or of the same major number and a higher minor one",
        )


def warnings(machine: Machine, there: Sequence[Card]) -> Iterator[Verdict]:
    """GPUs for which the kernels may not be built, where the build does not say."""
    if _built(machine):
        return
    other = [card for card in there if (capability := _numbers(card)) and not _runs(ARCHS, capability)]
    if other:
        yield verdict.warning(
            f"compute capability {', '.join(_versions(other))} is not among those the kernels are built for by default (9, 10)",
            f"if it was not done: {_rebuild(there)}",
        )


def _built(machine: Machine) -> tuple[str, ...]:
    extension = machine.trainer.extension
    return extension.architectures if extension is not None else ()


def _runs(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Machine code runs on its own capability and on later ones of the same major number (CUDA C++ Programming Guide, "Binary
    Compatibility"); none of the build is compiled at run time."""
    return any(int(arch[:-1]) == capability[0] and int(arch[-1]) <= capability[1] for arch in built)


def _rebuild(there: Sequence[Card]) -> str:
    """The command that builds for all of these GPUs, not only for those that lack kernels."""
    archs = ";".join(version.replace(".", "") for version in _versions(there))
    before, _, command = REBUILD.rpartition("make setup")
    return f'{before}ASYNCMOE_CUDA_ARCHS="{archs}" make setup{command} GPU=1'


def _versions(there: Sequence[Card]) -> list[str]:
    known = {numbers for card in there if (numbers := _numbers(card))}
    return [f"{major}.{minor}" for major, minor in sorted(known)]


def _version(arch: str) -> str:
    return f"{arch[:-1]}.{arch[-1]}"


def _numbers(card: Card) -> tuple[int, int] | None:
    if card.capability is None:
        return None
    major, _, minor = card.capability.partition(".")
    return int(major), int(minor)
