"""Payloads and answers in a real Redis server: whole after any kill, bounded, and deleted only by who holds the journal."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncmoe.config.journal import JournalSection
from asyncmoe.errors import DataError, InvariantBroken, StorageError, UserError
from asyncmoe.journal.turns import EpisodeKey
from asyncmoe.queue.start_order import Start
from tests.redis_server import LocalRedis, needed, server
from tests.unit.doc_pages import ROOT
from tests.unit.journal_stores import keep
from tests.unit.redis_journals import RedisJournals
from tests.unit.test_journal import OF, in_loop

pytestmark = needed()
__all__ = ["server"]
KEY = "asyncmoe:test:groups"


@pytest.fixture
def opened(server: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens the payloads of one key, each time as a new controller whose predecessor was killed."""
    from asyncmoe.journal.in_redis import payloads
    from asyncmoe.journal.in_redis.hold import Hold
    from asyncmoe.journal.in_redis.scripts import Keys
    from asyncmoe.journal.in_redis.server import RedisServer

    monkeypatch.setattr(payloads, "PART_BYTES", 100)
    monkeypatch.setattr(payloads, "_BATCH_BYTES", 350)
    with ExitStack() as held:

        def open_(max_bytes: int = 1 << 20) -> Any:
            with server.client() as client:
                client.hdel("asyncmoe:test:state", "client")
            to = RedisServer(server.url, None, 5.0)
            held.callback(to.close)
            hold = Hold(to, Keys("test"))
            hold.take()
            held.callback(hold.release)
            store = payloads.RedisPayloads.open(to, hold, KEY, max_bytes)
            held.callback(store.close)
            return store

        yield open_
    with server.client() as client:
        client.flushall()


def payload(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


SIZES = (0, 1, 99, 100, 101, 200, 350, 1001, 7)


def test_payloads_come_back_whole_whatever_their_parts(opened: Any) -> None:
    store = opened()

    async def body() -> list[Any]:
        return await asyncio.gather(
            *(keep(store, [payload(number, size)[:60], b"", payload(number, size)[60:]]) for number, size in enumerate(SIZES))
        )

    places = in_loop(body())
    for one in (store, opened()):
        assert [bytes(one.read(place)) for place in places] == [payload(number, size) for number, size in enumerate(SIZES)]
        assert one.size == store.size
    assert list(one.recorded()) == sorted(places)
    assert one.append([b"x"]).segment > max(place.segment for place in places), "a place never means two payloads"


def test_what_a_kill_cut_off_and_what_nobody_needs_is_deleted(opened: Any, server: LocalRedis) -> None:
    store = opened()

    async def body() -> list[Any]:
        return [await keep(store, [payload(number, size)]) for number, size in enumerate(SIZES)]

    places = in_loop(body())
    with server.client() as client:
        torn = places[7]
        client.hdel(KEY, f"{torn.segment}.10.1001")
        client.hset(KEY, "another", "field")
        again = opened()
        assert list(again.recorded()) == [place for place in places if place != torn]
        with pytest.raises(DataError, match=rf"{KEY} {torn.segment}.0.1001: got nothing, expected a payload's 104 bytes"):
            again.read(torn)
        before = again.size
        freed = again.retain({places[2].segment, places[8].segment}, places[8].segment)
        assert again.size == before - freed == 99 + 7 + 2 * 128
        assert sorted(client.hkeys(KEY)) == sorted(f"{places[at].segment}.0.{places[at].length}".encode() for at in (2, 8))
        late = in_loop(keep(store, [b"from one that was replaced"]))
        assert late.segment < in_loop(keep(again, [b"new"])).segment
        with pytest.raises(UserError, match="in use by another controller"):
            store.retain([])
    assert bytes(again.read(places[2])) == payload(2, 99)


def test_payloads_are_bounded_and_a_closed_store_takes_none(opened: Any) -> None:
    store = opened(max_bytes=1500)
    in_loop(keep(store, [bytes(500)]))
    for refused in (lambda: store.append([bytes(300)]), lambda: in_loop(store.room(300))):
        with pytest.raises(StorageError, match=r"journal\.max_bytes: got .* on disk and a payload of .*, expected at most"):
            refused()
    assert store.retain([]) > 500
    store.append([bytes(300)])
    store.close()
    store.close()
    with pytest.raises(InvariantBroken, match="closed journal"):
        store.append([b""])


def test_answers_of_episodes_under_way_are_recalled(server: LocalRedis, tmp_path: Path) -> None:
    journals, run = RedisJournals(server), tmp_path / "run"

    async def first() -> None:
        journal = journals.opened(run)
        journal.begin(0, 0, 4, 0)
        for number in (0, 1):
            journal.begun(Start(number))
            for answer in (b"one", b"two"):
                assert journal.turns is not None
                await journal.turns.record(EpisodeKey(number, 0, 0), b"asked", answer + b"%d" % number)
        journal.ended(1, "rejected", "scorer_nan")
        journal.close()

    async def second() -> None:
        journal = journals.opened(run)
        assert journal.turns is not None
        size = journal.turns.size
        assert [await journal.turns.recall(EpisodeKey(0, 0, 0), b"asked") for _ in range(3)] == [b"one0", b"two0", None]
        assert await journal.turns.recall(EpisodeKey(1, 0, 0), b"asked") is None
        journal.turns.over(0)
        await asyncio.sleep(1.2)
        assert journal.turns.size == 0 < size
        journal.close()

    in_loop(first())
    in_loop(second())


def test_the_user_of_the_guide_may_do_all_that_a_run_does(server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncmoe.journal.belonging import Belonging
    from asyncmoe.journal.in_redis import opening

    (line,) = re.findall(r"^user asyncmoe (.*)$", (ROOT / "docs/guides/journal.md").read_text(), re.MULTILINE)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "asyncmoe", *line.split())
    monkeypatch.setenv("SECRET", "PASSWORD")
    section = JournalSection(redis=f"{server.url}?username=asyncmoe&db=3", redis_password_variable="SECRET")

    async def body() -> None:
        for _ in range(2):
            journal = opening.open_journal(section, Belonging.of_run(tmp_path, OF))
            journal.begin(0, 0, 4, 0)
            journal.begun(Start(journal.recorded.next))
            await keep(journal._segments, [b"payload"])
            await journal.forget(0)
            await asyncio.sleep(1.2)  # the hold is heard of
            journal.close()

    in_loop(body())
