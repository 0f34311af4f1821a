"""What an update of the weights takes: bytes, seconds and pause, dense or as a delta, staged or written in place.

Sizes of deltas follow from their code (csrc/delta_format.h) if the changed elements lie at random; a test compares them with coded ones.
Seconds are those of the wire. A pause is the time in which a GPU's memory is written, or, where an update is
written in place, the whole transfer; launches and the controller's messages come on top. Nothing here has been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

CHANGED = (None, 0.01, 0.05)
"""Shares of the elements that change; None: everything is sent."""
_ONE_BYTE, _TWO_BYTES = 224, 8160
"""Gaps below these take one byte and two; others take four."""
_BLOCK, _ENTRY = 1 << 17, 8
_SECTOR = 32
"""Bytes that a GPU reads and writes for one element alone."""


@dataclass(frozen=True)
class UpdateForecast:
    """One update of all engines.

    Attributes:
        changed: share of the elements that are sent; None: all, without positions.
        bytes_wire: bytes between ranks.
        received: bytes of the engine rank that receives most.
        seconds: of the busiest rank's bytes at the speed of a NIC.
        pause: seconds for which an engine stands still.
        pause_in_place: the same, where a whole version is written in place; a coded delta is staged all the same.
    """

    changed: float | None
    bytes_wire: int
    received: int
    seconds: float
    pause: float
    pause_in_place: float


def coded_share(changed: float, item: int) -> float:
    """Return the bytes of a delta over those of all elements of `item` bytes, if a share `changed` of them, chosen at random, differs.

    A gap below `_ONE_BYTE` takes one byte, one below `_TWO_BYTES` two, any other four; a gap of at least g has probability (1 - changed)^g.
    """
    gap = 1 + (1 - changed) ** _ONE_BYTE + 2 * (1 - changed) ** _TWO_BYTES
    return min(1.0, changed * (gap + item) / item) + _ENTRY / _BLOCK


def updates(shard: int, bytes_wire: int, seconds: float, item: int, hbm: float) -> tuple[UpdateForecast, ...]:
    """Return an update for each of `CHANGED`.

    Args:
        shard: bytes of the engine rank that receives most of a whole version.
        bytes_wire, seconds: of a whole version; see `UpdateForecast`.
        item: bytes of an element.
        hbm: GB (1e9 bytes) per second that a GPU reads or writes.
    """
    return tuple(_update(shard, bytes_wire, seconds, item, hbm, changed) for changed in CHANGED)


def _update(shard: int, bytes_wire: int, seconds: float, item: int, hbm: float, changed: float | None) -> UpdateForecast:
    if changed is None:
        copied = 2 * shard / hbm / 1e9
        return UpdateForecast(None, bytes_wire, shard, seconds, copied, seconds)
    share = coded_share(changed, item)
    written = shard * (share + changed / item * 2 * _SECTOR) / hbm / 1e9
    return UpdateForecast(changed, int(share * bytes_wire), int(share * shard), share * seconds, written, written)
