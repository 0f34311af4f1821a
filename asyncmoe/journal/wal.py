"""Damage in SQLite's write-ahead log, which SQLite itself takes for its end: it would forget every later transaction without a word.

A log ends at the first frame that is not whole. After a power cut that is right for the newest transaction only, because each commit is on
disk before the next begins (synchronous=FULL). So a frame that is not whole, with a commit after it and something after that commit, once
was. The newest transaction may be torn as well as damaged: that cannot be told apart, and it is forgotten as one that was never made.

The format: https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = (0x377F0682, 0x377F0683)
"""The second: checksums read words in big-endian order, whatever the machine."""
_MASK = 0xFFFFFFFF

Sums = tuple[int, int]


@dataclass(frozen=True)
class _Frame:
    """`commits`: it is the last of a transaction. `present`: it was written since the log began anew. `said`: its checksum."""

    commits: bool
    present: bool
    said: Sums
    summed: bytes


def damage(log: bytes) -> str | None:
    """Return what shows that a log was longer than SQLite will read, in words; None if nothing does.

    Args:
        log: content of the file, `states.sqlite-wal`.
    """
    if len(log) <= _HEADER.size:
        return None
    magic, _, page_bytes, _, *salts, first, second = _HEADER.unpack_from(log)
    order = ">" if magic == _MAGIC[1] else "<"
    sums = _sum(order, log[: _HEADER.size - 8], (0, 0))
    if magic not in _MAGIC or sums != (first, second):
        return "a header that is not whole"
    frames = _frames(log, page_bytes, (salts[0], salts[1]))
    for number, frame in enumerate(frames):
        sums = _sum(order, frame.summed, sums)
        if not frame.present or sums != frame.said:
            rest = [frame, *frames]
            last = max((at for at, one in enumerate(rest) if one.present), default=0)
            if any(one.present and one.commits for one in islice(rest, last)):
                return f"frame {number} that is not whole, and transactions after it"
            return None
    return None


def _frames(log: bytes, page_bytes: int, salts: tuple[int, int]) -> Iterator[_Frame]:
    for at in range(_HEADER.size, len(log) - _FRAME.size - page_bytes + 1, _FRAME.size + page_bytes):
        _, pages, *salt, first, second = _FRAME.unpack_from(log, at)
        page = log[at + _FRAME.size : at + _FRAME.size + page_bytes]
        yield _Frame(pages > 0, (salt[0], salt[1]) == salts, (first, second), log[at : at + 8] + page)


def _sum(order: str, data: bytes, sums: Sums) -> Sums:
    """Return the checksum of section 4.2 of the format, which goes on from one frame to the next."""
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    first, second = sums
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second
