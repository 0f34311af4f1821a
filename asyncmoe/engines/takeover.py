"""What a controller does with an engine of the controller before it. Decisions only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
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


class Holding(Enum):
    """What an engine holds.

    Attributes:
        SERVES: a whole version, with which it goes on.
        WAITS: whole weights that are too old to sample with; it waits for the next version.
        DOUBTFUL: one of two sets of weights with one number, or parts of two; it must start again.
    """

    SERVES = "serves"
    WAITS = "waits"
    DOUBTFUL = "doubtful"


@dataclass(frozen=True)
class Taken:
    """An engine's holding, and the version and lineage that it serves if it does."""

    holding: Holding
    version: int = 0
    lineage: int = 0


def judge(weights: EngineWeights, reported: int) -> Taken:
    """Judge an engine by what the last controller said of all engines before it was lost.

    Args:
        reported: version that the engine reports once whatever the last controller asked of it has ended. A rank that cannot take a version
            ends its engine, so all ranks of one that answers have taken the version under way, or none has.
    """
    if weights.changing == "writing":
        return Taken(Holding.DOUBTFUL)
    if weights.changing == "loading" and reported == weights.coming:
        if weights.coming == weights.version:  # sent anew, in another lineage: its number tells nothing
            return Taken(Holding.DOUBTFUL)
        return Taken(Holding.SERVES, weights.coming, weights.coming_lineage)
    if reported == weights.version or not weights.landed:
        return Taken(Holding.SERVES, weights.version, weights.lineage)
    return Taken(Holding.WAITS)
