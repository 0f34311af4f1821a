"""The bytes of a segment file: its header and the head of a record. docs/journal-format.md has the tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Place:
    """Where a payload lies.

    Args:
        writer: number of the writer whose segments they are.
        segment: number of the segment, ascending from 0; never used twice.
        offset: of the record in the file, in bytes.
        length: of the payload, in bytes.
    """

    writer: int
    segment: int
    offset: int
    length: int
