"""The bytes of a segment file: its header and the head of a record. docs/journal-format.md has the tables."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from asyncmoe.trajectory.native import Buffer, crc32c

VERSION = 1
HEADER_BYTES = 64
HEAD_BYTES = 24
ALIGNMENT = 8
"""Records begin at multiples of it, which bounds the search for the next one after damage."""
RECORD_MAGIC = b"AMrd"
_FILE_MAGIC = b"AMOEsegm"
_HEADER = struct.Struct("<8sIIQ32sI")
_HEAD = struct.Struct("<QI4x")
_OFFSET = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Also a rollout worker's message has a place."""
_NAME = re.compile(r"([0-9]{4,10})-([0-9]{8,20})\.segment", re.ASCII)


@dataclass(frozen=True, order=True)
class Place:
    """Where a payload lies.

    Args:
        writer: number of the writer whose segments they are.
        segment: number of the segment, ascending from 0; never used twice.
        offset: of the record in the file, in bytes.
        length: of the payload, in bytes.
    """

    writer: _Number
    segment: _Number
    offset: _Number
    length: _Number

    @property
    def end(self) -> int:
        """Offset of the byte after the record."""
        return self.offset + footprint(self.length)


@dataclass(frozen=True)
class SegmentHeader:
    """What a segment file says of itself.

    Args:
        identity: SHA-256 of the store's identity.
    """

    version: int
    writer: int
    segment: int
    identity: bytes


@dataclass(frozen=True)
class RecordHead:
    """What precedes a payload.

    Args:
        length: bytes of the payload.
        digest: CRC-32C of the payload and its padding.
    """

    length: int
    digest: int


def pack_header(identity: bytes, writer: int, segment: int) -> bytes:
    """Return the first 64 bytes of a segment."""
    said = _HEADER.pack(_FILE_MAGIC, VERSION, writer, segment, identity, 0)
    return said + _CRC.pack(crc32c(said))


def unpack_header(data: bytes) -> SegmentHeader | None:
    """Read the first 64 bytes of a segment; None if they are damaged or too few."""
    if len(data) < HEADER_BYTES or _CRC.unpack_from(data, _HEADER.size)[0] != crc32c(data[: _HEADER.size]):
        return None
    magic, version, writer, segment, identity, _ = _HEADER.unpack_from(data)
    return SegmentHeader(version, writer, segment, identity) if magic == _FILE_MAGIC else None


def seed_of(identity: bytes, writer: int, segment: int) -> int:
    """Return the CRC with which the heads of a segment's records begin: no record of another file or place is taken for one of this."""
    return crc32c(pack_header(identity, writer, segment))


def pack_head(seed: int, offset: int, head: RecordHead) -> bytes:
    """Return the 24 bytes before a payload.

    Args:
        seed: `seed_of` the segment.
        offset: of the record in the file.
    """
    said = _HEAD.pack(head.length, head.digest)
    return RECORD_MAGIC + _CRC.pack(crc32c(said, crc32c(_OFFSET.pack(offset), seed))) + said


def unpack_head(data: Buffer, seed: int, offset: int) -> RecordHead | None:
    """Read the 24 bytes before a payload; None if they are damaged, too few, or of another place. Arguments as for `pack_head`."""
    if len(data) < HEAD_BYTES or data[:4] != RECORD_MAGIC:
        return None
    if _CRC.unpack_from(data, 4)[0] != crc32c(data[8:HEAD_BYTES], crc32c(_OFFSET.pack(offset), seed)):
        return None
    return RecordHead(*_HEAD.unpack_from(data, 8))


def padded(length: int) -> int:
    """Bytes of a payload with its padding of zeros."""
    return length + -length % ALIGNMENT


def footprint(length: int) -> int:
    """Bytes that a payload of `length` bytes takes in a segment."""
    return HEAD_BYTES + padded(length)


def file_name(writer: int, segment: int) -> str:
    """Name of a segment's file."""
    return f"{writer:04d}-{segment:08d}.segment"


def numbers_in(name: str) -> tuple[int, int] | None:
    """Writer and segment that a file's name says, or None if it is no segment's."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found and file_name(int(found[1]), int(found[2])) == name else None
