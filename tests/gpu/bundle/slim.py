"""Takes from a CUDA library the code of other cards than one. Only the standard library is imported here.

nvcc puts machine code and PTX for each architecture into sections of an ELF file (ELF-64 object file format, 1.5). Such a section is a
sequence of containers, each a header (magic, version, bytes of the header, bytes that follow) and entries, and an entry is a header (kind,
version, bytes of the header, bytes of the code, ..., architecture at byte 28) and code (the CUDA toolkit's fatbinary.h; cricket,
RWTH-ACS/cricket, cpu/cpu-elf2.c). The driver chooses an entry by its header. So headers stay, nothing moves, and code that is not wanted
becomes zeros, which compress to nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI")
_ALIGNMENT = 8


def slimmed(library: bytes, architecture: int) -> bytes:
    """Return a library in which all code but that for one architecture is zeros.

    Raises:
        ValueError: the file has no code for the architecture, or is no 64-bit ELF file.
    """
    kept, there = bytearray(library), set[int]()
    for found, start, end in codes_of(library):
        there.add(found)
        if found != architecture:
            kept[start:end] = bytes(end - start)
    if architecture not in there:
        raise ValueError(f"code for cards: got {sorted(there)}, expected some for {architecture}")
    return bytes(kept)


def codes_of(library: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (architecture, such as 90, first byte, byte after the last) of all code for cards in a library.

    Raises:
        ValueError: it is no 64-bit ELF file.
    """
    for at, end in _fat_sections(library):
        while at + _CONTAINER.size <= end:
            magic, _, header, size = _CONTAINER.unpack_from(library, at)
            if magic != _MAGIC:  # padding
                at += _ALIGNMENT
                continue
            entry, at = at + header, at + header + size
            while entry < at:
                _, _, entry_header, nbytes, architecture = _ENTRY.unpack_from(library, entry)
                yield architecture, entry + entry_header, entry + entry_header + nbytes
                entry += entry_header + nbytes


def _fat_sections(library: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the sections that hold code for cards."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("got another file, expected a 64-bit ELF library")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    step, count, names = struct.unpack_from("<HHH", library, 0x3A)
    sections = [struct.unpack_from("<II16xQQ", library, table + number * step) for number in range(count)]
    for name, _, start, size in sections:
        place = sections[names][2] + name
        if library[place : library.index(b"\0", place)] in _SECTIONS:
            yield start, start + size
