"""Decides what a controller does with an engine of its predecessor. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from asyncmoe.rpc.base import Count

Changing = Literal["", "loading", "writing"]


class EngineWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights that a run's engines have. A controller saves this for its successor before and after each change."""

    version: Count = 0
    """Version that the engines serve. If it equals `coming`, engines serve weights of the same number from another lineage."""
    lineage: Count = 0
    """Lineage of `version`; see `asyncmoe.rpc.messages.Leased`."""
    landed: bool = False
    """Whether any version has landed; until one has, engines have the weights that they started with."""
    changing: Changing = ""
    """"loading": each engine may switch to `coming` as a whole; "writing": parameters are written in place, so each engine may have part of
    it."""
    coming: Count = 0
    """Version under way, if engines are loading."""
    coming_lineage: Count = 0


@dataclass(frozen=True)
class Taken:
    """An engine that continues with the complete weights it has: it serves them, or `waits`, because they are too old to sample with."""

    version: int = 0
    lineage: int = 0
    waits: bool = False


def judge(weights: EngineWeights, reported: int) -> Taken | None:
    """Judge an engine by its last controller's record of all engines. None: it must start again, because its weights may be either of two
    sets with the same number, or parts of two.

    Args:
        reported: version that the engine reports once all requests of the last controller have ended. A rank that cannot switch to a
            version ends its engine, so in an engine that answers, all ranks have switched to the version under way, or none has.
    """
    if weights.changing == "writing":
        return None
    if weights.changing == "loading" and reported == weights.coming:
        # If a version is sent again in another lineage, its number cannot tell the two apart.
        return None if weights.coming == weights.version else Taken(weights.coming, weights.coming_lineage)
    if reported == weights.version or not weights.landed:
        return Taken(weights.version, weights.lineage)
    return Taken(waits=True)
