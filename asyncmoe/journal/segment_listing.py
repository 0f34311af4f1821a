"""What lies in the segments of a folder: counted and verified, without a lock and without a change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncmoe.errors import DataError, gibibytes
from asyncmoe.journal.segment_format import HEADER_BYTES, VERSION, numbers_in, seed_of, unpack_header
from asyncmoe.journal.segment_scan import ScannedRecord, scan

_MOST_SHOWN = 8
_FOLDERS = ("", "segments", "journal", "journal/segments")


@dataclass(frozen=True)
class ExaminedSegment:
    """A segment file.

    Args:
        nbytes: of the file.
        payloads: number of whole payloads.
        damaged: what is not, in order.
        unfinished: bytes after the last whole payload of a writer's newest segment: being written, or torn by a kill.
        problem: why no record was looked for; "" otherwise.
    """

    name: str
    nbytes: int
    payloads: int = 0
    damaged: tuple[ScannedRecord, ...] = ()
    unfinished: int = 0
    problem: str = ""

    @property
    def whole(self) -> bool:
        """Whether nothing in it is damaged."""
        return not self.damaged and not self.problem


def folder_of(place: Path) -> Path:
    """Return the folder of segments that a run directory has, or that `place` is.

    Raises:
        DataError: there is none.
    """
    for name in _FOLDERS:
        if (place / name).is_dir() and any(numbers_in(each.name) for each in (place / name).iterdir()):
            return place / name
    hint = "name the run directory, or the journal's folder if journal.folder is set"
    raise DataError("journal", got=f"{place}, without segments", expected="a folder with segments of a journal", hint=hint)


def examine(folder: Path) -> Iterator[ExaminedSegment]:
    """Read and verify every segment, in order. One that is deleted meanwhile is left out.

    Raises:
        DataError: a file cannot be read.
    """
    files = sorted((numbers, file) for file in folder.iterdir() if (numbers := numbers_in(file.name)))
    newest = {writer: segment for (writer, segment), _ in files}
    for (writer, segment), file in files:
        try:
            yield _examined(file, writer, segment, newest=newest[writer] == segment)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DataError(f"journal segment {file}", got=error.strerror or error, expected="a file that can be read") from error


def table(segments: list[ExaminedSegment]) -> str:
    """The segments for a reader, a line each, and their sum."""
    width = max(len("segment"), *(len(each.name) for each in segments))
    lines = [f"{'segment':{width}}{'payloads':>12}{'bytes':>14}   found"]
    lines += [f"{each.name:{width}}{each.payloads:>12}{gibibytes(each.nbytes):>14}   {_found(each)}" for each in segments]
    payloads, nbytes = sum(each.payloads for each in segments), sum(each.nbytes for each in segments)
    damaged = sum(not each.whole for each in segments)
    lines.append(f"{len(segments):<{width}}{payloads:>12}{gibibytes(nbytes):>14}   {f'{damaged} damaged' if damaged else 'whole'}")
    return "\n".join(lines)


def _examined(file: Path, writer: int, segment: int, *, newest: bool) -> ExaminedSegment:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        nbytes, header = os.fstat(fd).st_size, unpack_header(os.pread(fd, HEADER_BYTES, 0))
        if header is None:
            return ExaminedSegment(file.name, nbytes, problem="the header is damaged")
        if header.version != VERSION:
            return ExaminedSegment(file.name, nbytes, problem=f"format {header.version}, which another version of asyncmoe reads")
        if (header.writer, header.segment) != (writer, segment):
            return ExaminedSegment(file.name, nbytes, problem=f"the segment {header.segment} of writer {header.writer}")
        payloads = 0
        damaged: list[ScannedRecord] = []
        last: list[ScannedRecord] = []
        for record in scan(fd, seed_of(header.identity, writer, segment)):
            if record.whole:
                payloads += 1
                damaged.extend(last)
                last.clear()
            else:
                last.append(record)
    finally:
        os.close(fd)
    if newest:
        return ExaminedSegment(file.name, nbytes, payloads, tuple(damaged), sum(each.end - each.offset for each in last))
    return ExaminedSegment(file.name, nbytes, payloads, tuple(damaged + last))


def _found(segment: ExaminedSegment) -> str:
    found = [f"offset {each.offset}: {_damage(each)}" for each in segment.damaged[:_MOST_SHOWN]]
    if len(segment.damaged) > _MOST_SHOWN:
        found.append(f"{len(segment.damaged) - _MOST_SHOWN} more")
    if segment.problem:
        found.append(segment.problem)
    if segment.unfinished:
        found.append(f"{segment.unfinished} bytes at the end: being written, or torn by a kill")
    return "; ".join(found) or "whole"


def _damage(record: ScannedRecord) -> str:
    return f"{record.end - record.offset} damaged bytes" if record.length is None else f"a damaged payload of {record.length} bytes"
