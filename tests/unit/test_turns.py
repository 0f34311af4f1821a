"""Recorded responses of unfinished episodes: recovered after any stop, bounded, and deleted with their groups."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncmoe.log.turns import EpisodeId, Turns
from tests.unit.asynchronous import asynchronous
from tests.unit.log_lives import Home, settled

KEY = EpisodeId(3, 1, 0)


@contextmanager
def opened(folder: Path, attempts: dict[int, int], segment_bytes: int = 1 << 16, max_bytes: int = 1 << 24) -> Iterator[Turns]:
    store = Turns(Home().log(folder, "1.turns", max_bytes, segment_bytes=segment_bytes), attempts)
    try:
        yield store
    finally:
        store.close()


@asynchronous
async def test_answers_are_found_again_in_their_order_and_once(tmp_path: Path) -> None:
    with opened(tmp_path, {}) as store:
        for answer in (b"one", b"two"):
            await store.record(KEY, b"same", answer)
        await store.record(KEY, b"other", b"three")
        await store.record(EpisodeId(3, 0, 0), b"same", b"of another episode")
        assert await store.recall(KEY, b"same") is None, "only what an earlier process recorded is recalled"
    with opened(tmp_path, {3: 0}) as store:
        assert [await store.recall(KEY, b"same") for _ in range(3)] == [b"one", b"two", None]
        assert await store.recall(KEY, b"unknown") is None
        assert await store.recall(KEY, b"other") == b"three"
        await store.record(KEY, b"same", b"four")
    with opened(tmp_path, {3: 0}) as store:
        assert [await store.recall(KEY, b"same") for _ in range(3)] == [b"one", b"two", b"four"]


@asynchronous
@pytest.mark.parametrize("attempts", [{}, {3: 1}, {4: 0}], ids=["ended", "started again", "another"])
async def test_answers_of_what_is_not_under_way_are_gone(tmp_path: Path, attempts: dict[int, int]) -> None:
    with opened(tmp_path, {}) as store:
        await store.record(KEY, b"r", bytes(1000))
    with opened(tmp_path, attempts) as store:
        assert await store.recall(KEY, b"r") is None
        settled(store._log)
        assert store._log.size < 1000, "their segments are deleted"


@asynchronous
async def test_a_group_that_is_over_frees_its_segments(tmp_path: Path) -> None:
    with opened(tmp_path, {}, segment_bytes=1000) as store:
        for group in range(5):
            await store.record(EpisodeId(group, 0, 0), b"r", bytes(2000))
        settled(store._log)
        full = store._log.size
        for group in (0, 1, 3):
            store.over(group)
            settled(store._log)
        assert full - store._log.size >= 2 * 2000, "what is older than all that is needed"
    with opened(tmp_path, dict.fromkeys(range(5), 0)) as store:
        found = [await store.recall(EpisodeId(group, 0, 0), b"r") is not None for group in range(5)]
        assert found == [False, False, True, True, True]


@asynchronous
async def test_what_exceeds_the_bound_is_not_recorded_until_groups_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with opened(tmp_path, {}, segment_bytes=1 << 20, max_bytes=40_000) as store:
        for group in range(20):
            await store.record(EpisodeId(group, 0, 0), b"r", bytes(4000))
        settled(store._log)
        assert store._log.size <= 40_000
        assert [one.message for one in caplog.records if "log.max_bytes" in one.message] != []
        for group in range(8):
            store.over(group)
            settled(store._log)
        await store.record(KEY, b"later", bytes(4000))
    with opened(tmp_path, dict.fromkeys(range(20), 0), max_bytes=40_000) as store:
        assert await store.recall(KEY, b"later") == bytes(4000)
