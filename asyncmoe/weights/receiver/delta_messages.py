"""The messages of the weight protocol that updates need which may be deltas.

Update N    every trainer rank codes what changed and sets `offer(N, rank)`; rank 0 decides whether the update is a delta, sets
            `coming(N, rank)` for every engine rank, and then `header(N)` (`protocol.py`)

A receiver that finds its memory, or what it was sent, in doubt says so in its `Outcome`; `end(N)` is then doubtful too, and the trainer
sends the version again in full.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncmoe.weights.protocol import Key, Terms, engine_ranks

LARGEST_SHARE = 0.5
"""The share of the bytes of a full update that a delta takes at most, for every engine rank; else the update is full."""


class Portion(msgspec.Struct, frozen=True):
    """What a trainer rank sends to one engine rank.

    Attributes:
        dense: bytes of a full update.
        sizes: bytes of the messages of its delta, in order; empty if it has none.
        digest: the canonical digest of its elements in the version (`asyncmoe.reshard.delta_lanes`).
    """

    dense: int
    sizes: tuple[int, ...]
    digest: int


class Offer(msgspec.Struct, frozen=True):
    """What a trainer rank can send for an update.

    Attributes:
        base: the version that its delta changes; None: it can send everything only.
        parts: by engine rank.
        changed, elements: elements of the delta, and all elements that it covers; what several engine ranks get alike counts once.
    """

    failure: str = ""
    base: int | None = None
    parts: dict[int, Portion] = {}
    changed: int = 0
    elements: int = 0


class Coming(msgspec.Struct, frozen=True):
    """What an engine rank gets in an update.

    Attributes:
        sizes: bytes of the messages of a delta, in order, by trainer rank; empty for a full update.
        digests: the canonical digest of what it has from a trainer rank, by that rank.
    """

    sizes: dict[int, tuple[int, ...]]
    digests: dict[int, int]


def offer(update: int, rank: int) -> Key[Offer]:
    return Key(f"{update}.offer.{rank}", Offer)


def coming(update: int, rank: int) -> Key[Coming]:
    return Key(f"{update}.coming.{rank}", Coming)


def keys(update: int, terms: Terms) -> list[Key[Any]]:
    """Return all keys of an update that are in this file; none if the meeting has no deltas."""
    if not terms.delta:
        return []
    return [*(offer(update, rank) for rank in range(terms.engines[0].first)), *(coming(update, rank) for rank in engine_ranks(terms))]
