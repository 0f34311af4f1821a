"""Small stores of payloads whose content is known, and processes that are killed while they write one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from asyncmoe.journal.segment_folder import SegmentFolder
from asyncmoe.journal.segment_format import HEAD_BYTES, file_name, seed_of
from asyncmoe.journal.segment_scan import ScannedRecord, scan
from asyncmoe.journal.segments import Place, Segments

IDENTITY = "run 1, model m, seed 0"
SIZES = (0, 1, 7, 8, 9, 100, 33)


def payload(number: int, size: int) -> bytes:
    """The payload of a number."""
    return np.random.default_rng(number).bytes(size)


def opened(folder: Path, *, segment_bytes: int = 1 << 20, max_bytes: int = 1 << 30, **more: Any) -> Segments:
    return Segments.open(folder, more.pop("identity", IDENTITY), segment_bytes=segment_bytes, max_bytes=max_bytes, **more)


def crc(data: bytes, before: int = 0) -> int:
    """CRC-32C bit by bit, as RFC 3720 defines it."""
    state = ~before & 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return ~state & 0xFFFFFFFF


async def keep(store: Segments, parts: Sequence[Any]) -> Place:
    """Append, and wait until it is on disk."""
    await store.room(sum(memoryview(part).nbytes for part in parts))
    place = store.append(parts)
    await store.durable(place)
    return place


def stored(folder: Path, sizes: Sequence[int] = SIZES, **more: Any) -> list[Place]:
    """A closed store with payloads 0, 1, ... of these sizes."""

    async def write() -> list[Place]:
        with closing(opened(folder, **more)) as store:
            return [await keep(store, [payload(number, size)]) for number, size in enumerate(sizes)]

    return asyncio.run(write())


def records(folder: Path, segment: int, identity: str = IDENTITY) -> Iterator[ScannedRecord]:
    """What lies in a segment."""
    store = SegmentFolder.open(folder, identity)
    with closing(store):
        fd = store.open_segment(0, segment)
        try:
            yield from scan(fd, seed_of(store.identity, 0, segment))
        finally:
            os.close(fd)


def everything(folder: Path) -> list[bytes]:
    """Every whole payload of a folder's files, in order."""
    found = []
    for file in sorted(folder.glob("*.segment")):
        data, segment = file.read_bytes(), int(file.stem.split("-")[1])
        assert file.name == file_name(0, segment)
        for each in records(folder, segment):
            if each.whole and each.length is not None:
                found.append(data[each.offset + HEAD_BYTES :][: each.length])
    return found


CHANGES = ("pwritev", "fsync", "fdatasync", "rename", "ftruncate", "unlink")
"""Calls of the system that change what is on disk."""


def kill_before(call: int, share: float) -> None:
    """Have this process killed before one of its changes of the disk; if `share` > 0, when that share of one of its writes is written."""
    count = -1

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def change(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                if share:
                    fd, buffers, offset = arguments
                    whole = b"".join(buffers)
                    os.pwrite(fd, whole[: int(share * len(whole))], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)

        return change

    for name in CHANGES if not share else ["pwritev"]:
        setattr(os, name, counted(name))


async def work(folder: Path, said: int) -> None:
    """Open a store, write payloads, and say which are durable; and all of it once more."""
    for begin in (0, len(SIZES)):
        store = opened(folder, segment_bytes=256)
        for number, size in enumerate(SIZES, begin):
            place = await keep(store, [payload(number, size)])
            os.write(said, json.dumps([number, size, place.segment, place.offset]).encode() + b"\n")
        if begin:
            store.retain({0})
        store.close()


async def work_without_end(folder: Path, said: int, seed: int) -> None:
    """Write payloads from 16 tasks until the process is killed."""
    store, numbers, chance = opened(folder, segment_bytes=4 << 20), iter(range(1 << 30)), random.Random(seed)

    async def one() -> None:
        for number in numbers:
            size = int(10 ** chance.uniform(0, 5))
            place = await keep(store, [payload(number, size)])
            os.write(said, json.dumps([number, size, place.segment, place.offset]).encode() + b"\n")

    await asyncio.gather(*(one() for _ in range(16)))


def killed(folder: Path, run: Callable[[int], None], after_s: float | None = None) -> bool:
    """Run something in a process of its own; it writes to a file beside the folder. Returns whether it was killed.

    Args:
        after_s: seconds after the first durable payload until it is killed; None: it may do that itself.
    """
    said = os.open(folder.with_suffix(".said"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    child = os.fork()
    if not child:
        try:
            run(said)
        finally:
            os._exit(0)
    os.close(said)
    if after_s is not None:
        file, until = folder.with_suffix(".said"), time.monotonic() + 20
        while not file.stat().st_size and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(place: Path, seed: int) -> None:
    """Kill at every change of the disk, within every write, and at random moments; a folder each."""
    chance = random.Random(seed)
    for percent in (0, 50, 100):
        call = 0
        while True:
            folder = place / f"call-{call}-{percent}"

            def run(said: int, folder: Path = folder, call: int = call, share: float = percent / 100) -> None:
                kill_before(call, share)
                asyncio.run(work(folder, said))

            if not killed(folder, run):
                break
            call += 1
    for number in range(8):
        folder = place / f"moment-{number}"

        def run_on(said: int, folder: Path = folder, number: int = number) -> None:
            asyncio.run(work_without_end(folder, said, number))

        killed(folder, run_on, after_s=chance.uniform(0.0, 0.15))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
