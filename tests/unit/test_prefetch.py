"""Fetching ahead, against the real queue over its real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.config import Config, parse
from asyncmoe.errors import AsyncmoeError, DataError, EngineError, ProtocolError, WaitTimeout
from asyncmoe.log.log import Place
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Commit, Fetched, FindWorker, Foresee, Foreseen, Lease, Leased, WorkerFound
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trainer.data import held, prefetch
from asyncmoe.trainer.data.held import split
from asyncmoe.trainer.data.joined import ALIGNED, Joined, empty, joined, places_of
from asyncmoe.trainer.data.prefetch import FetchedAhead, Prefetcher, completed
from asyncmoe.trajectory import decode, encode, frames_in
from tests.unit.putting import Holding, put_group
from tests.unit.test_queue import asynchronous, group, queue


def configuration(staleness: int = 1, capacity: int | None = None, warmup: int = 0, steps: int = 9) -> Config:
    return parse(
        {
            "run": {"dir": "run", "steps": steps},
            "model": {"path": "model"},
            "task": {"kind": "arithmetic"},
            "warmup": {"steps": warmup, "batch": 4},
            "rollout": {"groups_per_step": 2, "group_size": 2},
            "queue": {"staleness": {"max_staleness": staleness}, "capacity": capacity},
        }
    )


class Controller:
    """A queue, its worker and their server on a thread of their own. `hold` holds the answers to fetches up while it is set."""

    def __init__(self, queue: BoundedQueue) -> None:
        self.queue, self.asked = queue, list[Any]()
        self.hold = threading.Event()
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        self.holding = Holding(self.queue)

        async def answer(request: Any) -> Any:
            self.asked.append(request)
            while isinstance(request, WorkerFetch) and self.hold.is_set():
                await asyncio.sleep(0.01)
            return await self.holding.answer(request)

        async with Server(answer) as server:
            self.rendezvous = self.holding.rendezvous = await server.start()
            self._serving = asyncio.ensure_future(server.serve())
            self._ready.set()
            await asyncio.gather(self._serving, return_exceptions=True)

    def do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(20)

    def call(self, what: Any, *arguments: Any) -> Any:
        async def do() -> Any:
            return what(*arguments)

        return self.do(do())

    def put(self, *numbers: int, version: int = 0) -> None:
        for number in numbers:
            self.call(self.queue.started, 2)
            self.do(self.holding.put(group(number, version)))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(10)


@contextmanager
def rank(*, decodes: bool = True, choose: Any = None) -> Iterator[tuple[Controller, Client, Prefetcher]]:
    """A controller of four groups of which step 0 has leased two, and a rank of it."""
    controller = Controller(queue(capacity=12))
    controller.put(0, 1)
    with Client(controller.rendezvous, "t") as client:
        ahead = Prefetcher(
            Client(controller.rendezvous, "t.ahead"),
            configuration(),
            choose or (lambda items: range(len(items))),
            (),
            masks=True,
            decodes=decodes,
        )
        leased(client, 0)
        try:
            yield controller, client, ahead
        finally:
            controller.hold.clear()
            ahead.close()
            controller.close()


def leased(client: Client, step: int) -> Leased:
    got = client.ask(Lease(step, "rl", 4, step, 10.0), 20)[0]
    assert isinstance(got, Leased)
    assert got.items
    return got


def until_asked(controller: Controller, kind: type) -> None:
    for _ in range(1000):
        if any(isinstance(one, kind) for one in controller.asked):
            return
        time.sleep(0.01)
    raise AssertionError(kind)


def next_batch(controller: Controller, client: Client, ahead: Prefetcher, wanted: Sequence[int] = (0, 1, 2, 3)) -> list[WorkerFetch]:
    """Commit step 0, and take step 1's trajectories, which must be those of its lease. Return what was asked of the controller for it."""
    client.ask(Commit(0), 20)
    batch = leased(client, 1)
    items = [batch.items[i] for i in wanted]
    ready = ahead.take(1, items)
    whole = completed(items, ready, lambda keys: held.fetch(client, [item for item in items if item.key in keys], (), True))
    undecoded = bool(ready) and all(one.decoded is None for one in ready.values())
    assert isinstance(whole, Joined) == (undecoded and len(ready) == len(items))
    found = whole.buffers if isinstance(whole, Joined) else whole
    assert [bytes(frame) for frame in found] == [bytes(frame) for frame in held.fetch(client, items, (), True)]
    for key, one in ready.items():
        assert one.decoded is None or encode(one.decoded) == encode(decode(split([key], one.frames)[key]))
    return [one for one in controller.asked if isinstance(one, WorkerFetch)][:-1]


@pytest.mark.parametrize("decodes", [True, False])
def test_a_batch_that_was_fetched_ahead_is_not_fetched_again(decodes: bool) -> None:
    with rank(decodes=decodes) as (controller, client, ahead):
        ahead.begin(1)
        until_asked(controller, Foresee)
        controller.put(2, 3)
        until_asked(controller, WorkerFetch)
        assert next_batch(controller, client, ahead) == [WorkerFetch(("g2.e0", "g2.e1", "g3.e0", "g3.e1"), 4 * (Place(1, 0),), ())]


def test_a_batch_that_is_not_known_in_time_is_fetched_when_it_is_leased() -> None:
    with rank() as (controller, client, ahead):
        ahead.begin(1)
        until_asked(controller, Foresee)
        begin = time.monotonic()
        assert not ahead.take(1, ())  # the thread waits for an answer, which nobody waits for here
        assert time.monotonic() - begin < 1
        controller.put(2, 3)
        assert [one.keys for one in next_batch(controller, client, ahead)] == [("g2.e0", "g2.e1", "g3.e0", "g3.e1")]


def test_a_fetch_that_has_begun_is_waited_for() -> None:
    with rank() as (controller, client, ahead):
        controller.put(2, 3)
        controller.hold.set()
        ahead.begin(1)
        until_asked(controller, WorkerFetch)
        threading.Timer(0.3, controller.hold.clear).start()
        assert len(next_batch(controller, client, ahead)) == 1


def test_a_trajectory_is_used_only_if_the_lease_has_it_unchanged() -> None:
    """An older group that arrives meanwhile is leased in place of the newest, and one has another weight."""
    with rank() as (controller, client, ahead):
        controller.call(controller.queue.set_version, 1)
        controller.put(2, 3, version=1)
        ahead.begin(1)
        until_asked(controller, WorkerFetch)
        controller.put(4, version=0)
        fetches = next_batch(controller, client, ahead)
        assert [one.keys for one in fetches] == [("g2.e0", "g2.e1", "g3.e0", "g3.e1"), ("g4.e0", "g4.e1")]
    with rank() as (controller, client, ahead):
        controller.put(2, 3)
        ahead.begin(1)
        until_asked(controller, WorkerFetch)
        items = controller.do(controller.queue.foresee(1, 4, 1, 0.0)).items
        changed = [msgspec.structs.replace(items[0], reward=7.0), *items[1:]]
        assert set(ahead.take(1, changed)) == {"g2.e1", "g3.e0", "g3.e1"}


def test_a_rank_fetches_ahead_what_it_trains_on_alone() -> None:
    with rank(choose=lambda items: [1, 3]) as (controller, client, ahead):
        controller.put(2, 3)
        ahead.begin(1)
        until_asked(controller, WorkerFetch)
        fetches = next_batch(controller, client, ahead, [1, 3])
        assert [one.keys for one in fetches] == [("g2.e1", "g3.e1")]
    with rank(choose=lambda items: []) as (controller, client, ahead):
        controller.put(2, 3)
        ahead.begin(1)
        assert not ahead.take(1, ())
        assert not [one for one in controller.asked if isinstance(one, WorkerFetch)]


def test_a_run_that_stops_is_not_delayed_by_a_batch_that_was_fetched_ahead() -> None:
    with rank() as (controller, client, ahead):
        controller.put(2, 3)
        ahead.begin(1)
        until_asked(controller, WorkerFetch)
        controller.call(controller.queue.stop)
        client.ask(Commit(0), 20)
        answer = client.ask(Lease(1, "rl", 4, 1, 10.0), 20)[0]
        assert isinstance(answer, Leased)
        assert (answer.stop, answer.items) == (True, ())
        assert controller.queue.stats().depth == 4


def test_the_thread_asks_once_if_there_is_nothing_to_fetch_ahead() -> None:
    with rank() as (controller, _, ahead):
        controller.call(controller.queue.stop)
        ahead.begin(1)
        assert ahead._under_way is not None
        assert ahead._under_way[1].result(10) == {}
        assert [one for one in controller.asked if isinstance(one, Foresee)] == [Foresee(1, 4, 1, 2.0)]


def test_an_error_of_the_thread_is_raised_where_the_batch_is_wanted() -> None:
    """Its own: the engines failed, the plan for the batch, or a frame that was damaged on the way."""
    with rank() as (controller, client, ahead):
        ahead.begin(1)
        until_asked(controller, Foresee)
        controller.call(controller.queue.fail, EngineError("the last engine is lost"))
        assert ahead._under_way is not None
        assert isinstance(ahead._under_way[1].exception(10), EngineError)
        with pytest.raises(EngineError, match="the last engine is lost"):
            ahead.take(1, ())
    with rank(choose=lambda items: 1 // 0) as (controller, client, ahead):
        controller.put(2, 3)
        ahead.begin(1)
        client.ask(Commit(0), 20)
        batch = leased(client, 1)
        assert ahead._under_way is not None
        assert isinstance(ahead._under_way[1].exception(10), ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            ahead.take(1, batch.items)


def test_what_is_damaged_on_the_way_is_refused() -> None:
    class Damaging:
        def __init__(self, frames: list[bytes]) -> None:
            self.frames = frames

        def ask(self, request: Any, timeout_s: float) -> Any:
            item: Any = SimpleNamespace(place=Place(1, 0), key="g7.e0")
            here: Any = "here"
            said = {Foresee: (Foreseen((item,)), []), FindWorker: (WorkerFound(here), []), WorkerFetch: (Fetched(), self.frames)}
            return said[type(request)]

        def beside(self, *_: object) -> Damaging:
            return self

        def close(self) -> None: ...

    whole = [bytes(frame) for frame in encode(group(7)[0])]
    for frames, said in (([whole[0], b"\0" * len(whole[1]), *whole[2:]], "digest"), (whole[:-1], "frames")):
        client: Any = Damaging(frames)
        ahead = Prefetcher(client, configuration(), lambda items: [0], (), masks=True, decodes=True)
        ahead.begin(1)
        assert ahead._under_way is not None
        assert ahead._under_way[1].exception(10)
        with pytest.raises(ProtocolError, match=said):
            ahead.take(1, ())
        ahead.close()


@pytest.mark.parametrize("lost", [True, False])
def test_what_left_the_queue_meanwhile_or_is_with_a_lost_worker_is_no_error(lost: bool) -> None:
    with rank() as (controller, _, ahead):
        if lost:
            controller.holding.rendezvous = None
        else:
            controller.holding.worker.fetch = AsyncMock(side_effect=DataError("log", got="nothing there", expected="a record"))  # type: ignore[method-assign]
        controller.put(2, 3)
        ahead.begin(1)
        assert ahead._last is not None
        assert ahead._last.result(10) == {}
        assert any(isinstance(one, FindWorker) for one in controller.asked)


def test_a_rank_waits_for_a_worker_that_is_lost_and_asks_again_one_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_AGAIN_S", 0.0)
    there, gone = Mock(), Mock()
    gone.ask.side_effect = WaitTimeout("rollout worker 1", "the connection was lost", 0.0)
    there.ask.return_value = (Fetched(), [b""] * frames_in(1))
    for places, fine in ((("", None, "", "again"), True), (("",) * 3, False)):
        client: Any = Mock()
        client.ask.side_effect = [(WorkerFound(place), []) for place in places]
        client.beside.side_effect = lambda place, _: there if place else gone
        items: list[Any] = [SimpleNamespace(place=Place(1, 0), key="g0.e0")]
        if fine:
            assert held.fetch(client, items, None, True) == [b""] * frames_in(1)
        else:
            with pytest.raises(WaitTimeout, match="the connection was lost"):
                held.fetch(client, items, None, True)


def test_a_thread_that_waits_ends_with_its_rank() -> None:
    with rank() as (controller, _, ahead):
        ahead.begin(1)
        until_asked(controller, Foresee)
        assert not ahead.take(1, ())
        ahead.close()
        assert ahead._last is not None
        assert ahead._last.result(0) == {}


def test_only_what_was_joined_whole_and_in_order_is_broadcast_as_it_is() -> None:
    frames = [bytes(frame) for number in (1, 2) for one in group(number) for frame in encode(one)]
    items: list[Any] = [SimpleNamespace(place=Place(1, 0), key=one.key) for number in (1, 2) for one in group(number)]
    whole = joined(frames)
    parts = split([item.key for item in items], whole.buffers)
    ready = {item.key: FetchedAhead(item, parts[item.key], joined=whole) for item in items}

    def send(keys: tuple[str, ...]) -> list[bytes]:
        return [frame for one in group(1) if one.key in keys for frame in encode(one)]  # type: ignore[misc]

    assert completed(items, ready, send) is whole
    for some, there in ((items[::-1], ready), (items[:3], ready), (items, dict(list(ready.items())[1:]))):
        found = completed(some, there, send)
        assert not isinstance(found, Joined)
        each = len(frames) // 4
        assert [bytes(one) for one in found] == [
            frame for item in some for at in [items.index(item)] for frame in frames[at * each :][:each]
        ]


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_joined_buffers_lie_apart_and_aligned(buffers: list[bytes]) -> None:
    made = joined(buffers)
    assert [bytes(one) for one in made.buffers] == buffers
    assert all(one.readonly for one in made.buffers)
    places = places_of([len(one) for one in buffers])
    assert all(place.start % ALIGNED == 0 for place in places)
    assert [bytes(made.whole[place]) for place in places] == buffers
    alike = empty([len(one) for one in buffers])
    assert [len(one) for one in alike.buffers] == [len(one) for one in buffers]
    assert alike.whole.shape == made.whole.shape


# ---------------------------------------------------------------- when


@given(staleness=st.integers(0, 3), capacity=st.none() | st.integers(4, 20), warmup=st.integers(0, 2), steps=st.integers(1, 4))
def test_only_a_batch_that_can_be_complete_is_fetched_ahead(staleness: int, capacity: int | None, warmup: int, steps: int) -> None:
    """Of a synchronous run none can; nor of a queue that cannot hold two; nor the first of reinforcement learning."""
    config = configuration(staleness, capacity, warmup, steps)
    due = [step for step in range(warmup + steps + 2) if prefetch.due(config, step)]
    can = staleness > 0 and (capacity or (staleness + 1) * 4) >= 8
    assert due == (list(range(warmup + 1, warmup + steps)) if can else [])
    assert prefetch.possible(config) == can


# ---------------------------------------------------------------- the queue's answer


@asynchronous
async def test_a_batch_is_foreseen_as_soon_as_nothing_that_runs_can_change_it() -> None:
    made = queue(capacity=16, max_staleness=2)
    for number in range(3):
        made.started(2)
        await put_group(made, group(number))
    made.started(2)
    assert not (await made.foresee(0, 4, 0, 0.0)).items  # the fourth group began at the same version, and may be as old
    asked = [asyncio.create_task(made.foresee(0, 4, 0, 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    made.rejected(2, "score")
    found = [await one for one in asked]
    assert [item.key for item in found[0].items] == ["g0.e0", "g0.e1", "g1.e0", "g1.e1"]
    assert found[0] is found[1]  # so that the server encodes it once
    batch = await made.lease(0, "rl", 4, 0, 1.0)
    assert batch.items == found[0].items == (await made.foresee(0, 4, 0, 0.0)).items


@asynchronous
async def test_a_foreseen_batch_has_the_weights_of_its_lease_and_nothing_stale() -> None:
    made = queue(capacity=32, rule="downweight", downweight=0.5, drop_above=3, max_staleness=1)
    for version in range(5):
        made.set_version(version)
        made.started(2)
        await put_group(made, group(version, version))
    found = (await made.foresee(4, 4, 5, 0.0)).items
    assert [(item.group, item.weight) for item in found] == [(2, 0.25), (2, 0.25), (3, 0.5), (3, 0.5)]
    assert made.ledger.dropped == 0
    assert (await made.lease(4, "rl", 4, 5, 1.0)).items == found
    assert made.ledger.dropped == 4


@asynchronous
async def test_some_batches_are_never_foreseen() -> None:
    made = queue()
    for number in range(2):
        made.started(2)
        await put_group(made, group(number))
    await made.lease(0, "rl", 4, 0, 1.0)
    made.commit(0)
    assert await made.foresee(0, 4, 0, 60.0) == Foreseen(never=True)
    waiting = asyncio.create_task(made.foresee(1, 4, 1, 60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    made.stop()
    assert await waiting == Foreseen(never=True)
    with pytest.raises(ProtocolError, match="got 3 episodes"):
        await made.foresee(1, 3, 1, 0.0)
    with pytest.raises(ProtocolError, match="wait_s inf"):
        await made.foresee(1, 4, 1, float("inf"))
    failed = queue()
    failed.fail(AsyncmoeError("nothing comes any more"))
    with pytest.raises(AsyncmoeError, match="nothing comes any more"):
        await failed.foresee(0, 4, 0, 60.0)
