"""What a controller does with an engine of the controller before it. Decisions only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from asyncmoe.rpc.base import Count

Changing = Literal["", "loading", "writing"]


class EngineWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engines of a run hold. A controller has it kept for the next one before each change of them, and after it."""

    version: Count = 0
    """Version that the engines serve; `coming` if one of them serves weights of that number from another lineage."""
    lineage: Count = 0
    """Of `version`; see `asyncmoe.rpc.messages.Leased`."""
    landed: bool = False
    """Whether any version has landed; without one, engines hold the weights that they started with."""
    changing: Changing = ""
    """"loading": each engine may take `coming`, as a whole; "writing": their parameters are written in place, so that each may hold a part
    of it."""
    coming: Count = 0
    """Version under way, if engines are loading."""
    coming_lineage: Count = 0


@dataclass(frozen=True)
class Taken:
    """An engine that goes on with the whole weights that it holds: it serves them, or `waits`, because they are too old to sample with."""

    version: int = 0
    lineage: int = 0
    waits: bool = False


def judge(weights: EngineWeights, reported: int) -> Taken | None:
    """Judge an engine by what the last controller said of all engines before it was lost. None: it must start again, because it holds one
    of two sets of weights with one number, or parts of two.

    Args:
        reported: version that the engine reports once whatever the last controller asked of it has ended. A rank that cannot take a version
            ends its engine, so all ranks of one that answers have taken the version under way, or none has.
    """
    if weights.changing == "writing":
        return None
    if weights.changing == "loading" and reported == weights.coming:
        # Sent anew, in another lineage, its number tells nothing.
        return None if weights.coming == weights.version else Taken(weights.coming, weights.coming_lineage)
    if reported == weights.version or not weights.landed:
        return Taken(weights.version, weights.lineage)
    return Taken(waits=True)
