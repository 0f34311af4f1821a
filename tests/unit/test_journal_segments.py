"""The payload store: what comes back, what is found damaged, who may write, and what is deleted."""

from __future__ import annotations

import asyncio
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import DataError, InvariantBroken, StorageError
from asyncmoe.journal.segments import Place, Segments
from tests.unit.journal_stores import IDENTITY, SIZES, crc, everything, keep, opened, payload, records, stored


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=300), max_size=4), max_size=20),
    st.integers(0, 1500),
    st.lists(st.integers(0, 19), max_size=2),
)
def test_payloads_come_back_in_every_session(payloads: Sequence[Sequence[bytes]], segment_bytes: int, stops: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, places = Path(place) / "store", []

        async def write() -> None:
            store = opened(folder, segment_bytes=segment_bytes)
            for number, parts in enumerate(payloads):
                if number in stops:
                    store.close()
                    store = opened(folder, segment_bytes=segment_bytes)
                places.append(store.append([memoryview(part) for part in parts]))
            await asyncio.gather(*(store.durable(one) for one in places))
            store.close()

        asyncio.run(write())
        assert len(set(places)) == len(places)
        with closing(opened(folder)) as store:
            assert [bytes(store.read(one)) for one in places] == [b"".join(parts) for parts in payloads]
            assert store.size == sum(file.stat().st_size for file in folder.glob("*.segment"))
            assert store.torn == 0
        assert everything(folder) == [b"".join(parts) for parts in payloads]
        for number in range(max((one.segment for one in places), default=-1) + 1):
            inside = [one for one in places if one.segment == number]
            assert len(inside) <= 1 or max(one.end for one in inside) <= segment_bytes


def test_the_files_are_as_the_format_says(tmp_path: Path) -> None:
    places = stored(tmp_path / "store", [5, 0], writer=0)
    header = b"AMOEsegm" + struct.pack("<IIQ32sI", 1, 0, 0, sha256(IDENTITY.encode()).digest(), 0)
    seed = crc(header)
    data = header + struct.pack("<I", seed)
    seed = crc(data)
    for number, (place, size) in enumerate(zip(places, (5, 0), strict=True)):
        body = payload(number, size) + bytes(-size % 8)
        said = struct.pack("<QII", size, crc(body), 0)
        assert place == Place(0, 0, len(data), size)
        data += b"AMrd" + struct.pack("<I", crc(said, crc(struct.pack("<Q", len(data)), seed))) + said + body
    assert (tmp_path / "store" / "0000-00000000.segment").read_bytes() == data


def test_every_flipped_byte_is_found_and_nothing_else_is_lost(tmp_path: Path) -> None:
    places = stored(tmp_path / "store")
    (file,) = (tmp_path / "store").glob("*.segment")
    data = bytearray(file.read_bytes())
    reader = opened(tmp_path / "store")
    with closing(reader):
        for byte in range(len(data)):
            data[byte] ^= 1 << byte % 8
            file.write_bytes(data)
            hit = [number for number, place in enumerate(places) if place.offset <= byte < place.end]
            assert len(hit) == (byte >= 64)
            for number, place in enumerate(places):
                if number in hit:
                    with pytest.raises(DataError, match=f"{file.name} offset {place.offset}: got damage|got a damaged"):
                        reader.read(place)
                else:
                    assert reader.read(place) == payload(number, SIZES[number])
            found = [each.offset for each in records(tmp_path / "store", 0) if each.whole]
            assert found == [place.offset for number, place in enumerate(places) if number not in hit]
            data[byte] ^= 1 << byte % 8


def test_damage_before_the_end_is_kept_for_who_reads_it(tmp_path: Path) -> None:
    places = stored(tmp_path / "store", [100, 5000, 0, 100])
    (file,) = (tmp_path / "store").glob("*.segment")
    data = bytearray(file.read_bytes())
    for at in (places[1].offset + 8, places[1].offset + 500):
        data[at] ^= 255
    data += b"AMrd" * 10
    file.write_bytes(data)
    with closing(opened(tmp_path / "store")) as store:
        assert store.torn == 40
        assert [len(store.read(places[number])) for number in (0, 2, 3)] == [100, 0, 100]
        with pytest.raises(DataError, match=r"offset 192: got damage before the payload"):
            store.read(places[1])


def test_a_segment_without_a_header_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place,) = stored(tmp_path / "store", [100])
    file = tmp_path / "store" / "0000-00000000.segment"
    data = bytearray(file.read_bytes()) + b"torn"
    data[30] ^= 1
    file.write_bytes(data)
    for identity in ("another run, perhaps", IDENTITY):
        with closing(opened(tmp_path / "store", identity=identity)) as store:
            assert file.read_bytes() == data
            assert f"{file}: the header is damaged" in caplog.text
            if identity == IDENTITY:
                assert store.read(place) == payload(0, 100)
        (tmp_path / "store" / "0000-00000001.segment").unlink()


NOWHERE = [
    (0, 64, 6),
    (0, 72, 5),
    (0, 0, 5),
    (0, -8, 5),
    (9, 64, 5),
    (0, 64, -1),
    (0, 64, 1 << 60),
    (0, 1 << 70, 5),
    (1, 64, 0),
    (-1, 64, 0),
]


@pytest.mark.parametrize("place", [*(Place(0, *one) for one in NOWHERE), Place(1, 0, 64, 5)])
def test_where_no_payload_lies_none_is_read(tmp_path: Path, place: Place) -> None:
    (there,) = stored(tmp_path / "store", [5])
    with closing(opened(tmp_path / "store")) as store:
        assert len(store.read(there)) == 5
        with pytest.raises(DataError, match=rf"\.segment offset {place.offset}: got .*, expected a payload of {place.length} bytes"):
            store.read(place)
        if place.segment > 0 or place.writer:
            with pytest.raises(DataError):
                asyncio.run(store.durable(place))


def test_arrays_of_any_kind_and_size_are_written_as_they_lie(tmp_path: Path) -> None:
    big = np.arange(5 << 20, dtype=np.int64)
    parts = [b"head", big.data, np.zeros((0, 3)).data, np.ones((3, 4), np.float16).data, bytearray(b"x"), np.array([True]).data, b""]
    with closing(opened(tmp_path / "store", segment_bytes=1 << 20)) as store:
        small, place = asyncio.run(keep(store, [b"before"])), asyncio.run(keep(store, parts))
        assert bytes(store.read(place)) == b"head" + big.tobytes() + np.ones(12, np.float16).tobytes() + b"x\1"
        assert place.segment == small.segment + 1
        with pytest.raises((TypeError, ValueError)):
            store.append([big.data[::2]])
        assert len(store.read(asyncio.run(keep(store, [b"after"])))) == 5


def test_thousands_of_tiny_payloads_share_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (syncs.append(fd), fdatasync(fd)))

    async def write(store: Segments) -> list[Place]:
        return await asyncio.gather(*(keep(store, [number.to_bytes(3, "big")]) for number in range(5000)))

    with closing(opened(tmp_path / "store")) as store:
        places = asyncio.run(write(store))
        assert [int.from_bytes(store.read(place), "big") for place in places] == list(range(5000))
    assert len(syncs) < 100


def test_the_bound_is_kept_and_room_comes_back(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store", segment_bytes=1000, max_bytes=4000)) as store:
        places = [store.append([bytes(500)]) for _ in range(6)]
        with pytest.raises(
            StorageError, match=r"^journal.max_bytes: got .*, expected at most .*; raise it, or lower trainer.checkpoint_every"
        ):
            store.append([bytes(500)])
        with pytest.raises(StorageError, match=r"journal.max_bytes"):
            asyncio.run(store.room(500))
        asyncio.run(store.durable(places[-1]))
        assert 3000 < store.size == sum(file.stat().st_size for file in (tmp_path / "store").glob("*.segment")) <= 4000
        freed = store.retain({places[0].segment})
        assert freed > 1000
        assert store.size == sum(file.stat().st_size for file in (tmp_path / "store").glob("*.segment"))
        asyncio.run(keep(store, [bytes(500)]))
        assert len(store.read(places[0])) == 500
        with pytest.raises(DataError, match="No such file"):
            store.read(places[1])


def test_what_writers_have_left_that_the_run_has_no_more_is_deleted_if_nothing_needs_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    places = {writer: stored(folder, [40, 50, 60], writer=writer, segment_bytes=64) for writer in (0, 1, 2, 3)}
    needed = {3: {places[3][1].segment}}
    with closing(opened(folder)) as store:
        assert store.retain_left(needed, writers=1) > 0
        for writer, there in places.items():
            for place in there:
                if writer < 2 or place.segment in needed.get(writer, ()):
                    assert len(store.read(place)) == place.length
                else:
                    with pytest.raises(DataError):
                        store.read(place)
        assert store.retain_left(needed, writers=1) == 0


def test_retain_takes_nothing_that_is_being_appended(tmp_path: Path) -> None:
    """One thread deletes all that nobody holds, while others append and let go."""
    lost: list[str] = []
    freed, done = 0, threading.Event()

    async def write(store: Segments) -> None:
        async def one(number: int) -> None:
            place = store.append([payload(number, 400)])
            segments.append(place.segment)
            await store.durable(place)
            if await asyncio.to_thread(store.read, place) != payload(number, 400):
                lost.append(str(place))
            segments.remove(place.segment)

        for begin in range(0, 200, 20):
            await asyncio.gather(*(one(begin + number) for number in range(20)))

    segments: list[int] = []
    with closing(opened(tmp_path / "store", segment_bytes=2000)) as store:

        def delete() -> None:
            nonlocal freed
            while not done.is_set():
                newest = max(store._sizes)
                freed += store.retain({*segments, *range(newest, newest + 1000)})

        thread = threading.Thread(target=delete)
        thread.start()
        try:
            asyncio.run(write(store))
        finally:
            done.set()
            thread.join()
        assert not lost
        assert freed > 20_000
        assert store.size == sum(file.stat().st_size for file in (tmp_path / "store").glob("*.segment"))


def test_what_is_appended_while_another_thread_closes_is_kept_or_refused(tmp_path: Path) -> None:
    for _ in range(20):
        store, places = opened(tmp_path / "store"), []
        thread = threading.Thread(target=store.close)
        thread.start()
        with pytest.raises(InvariantBroken):
            places.extend(store.append([b"kept"]) for _ in range(1_000_000))
        thread.join()
        for place in places[-1:]:
            asyncio.run(asyncio.wait_for(store.durable(place), 5))


def test_a_closed_store_takes_and_deletes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    place = store.append([b"kept"])
    store.close()
    store.close()
    with pytest.raises(InvariantBroken):
        store.append([b""])
    with pytest.raises(InvariantBroken):
        store.retain([])
    with pytest.raises(InvariantBroken, match="was used after it was closed"):
        store.read(place)
    asyncio.run(store.durable(place))
    with closing(opened(tmp_path / "store")) as again:
        assert again.read(place) == b"kept"
