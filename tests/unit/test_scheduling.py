"""The choice of the next request and its engine, and the gate that enforces it under random cancellation."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.config.rollout import Order
from asyncmoe.engines.gate import Gate
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.scheduling import KEPT_PROMPTS, Lengths, Recent, ScheduledRequest, Waiting, choose
from asyncmoe.engines.types import ABORTED, EngineLost, Generation, Sampling, VersionSpan
from tests.unit.asynchronous import asynchronous, settle
from tests.unit.example_counts import examples
from tests.unit.fake_engine import FakeEngine, handles
from tests.unit.generations import generation_of

LOADS = st.dictionaries(st.sampled_from([f"engine.{i}" for i in range(8)]), st.integers(0, 20), min_size=1)
ORDERS = st.sampled_from(["fifo", "longest_first", "probes_first"])
REQUESTS = st.builds(ScheduledRequest, st.sampled_from(["", "a", "b", "c", "d"]), st.booleans())
MEANS = {"a": 10, "b": 40, "c": 40}
"""Known lengths; "d" and "" are expected to be as long as all on average, 30."""


def known() -> Lengths:
    lengths = Lengths()
    for prompt, tokens in MEANS.items():
        lengths.note(prompt, tokens)
    return lengths


@given(loads=LOADS)
def test_a_conversation_goes_home_as_far_as_the_slack_allows_and_else_to_the_least_loaded(loads: dict[str, int]) -> None:
    least = min(loads.values())
    assert loads[choose(loads)] == loads[choose(loads, "engine.gone")] == least
    for last, load in loads.items():
        chosen = choose(loads, last)
        assert chosen == last if load <= max(least + 2, int(1.25 * least)) else loads[chosen] == least


@settings(max_examples=20)
@given(noted=st.lists(st.tuples(st.integers(0, 3 * KEPT_PROMPTS), st.integers(0, 100)), min_size=1, max_size=50))
def test_only_the_most_recent_prompts_are_remembered(noted: list[tuple[int, int]]) -> None:
    lengths = Lengths()
    for prompt, tokens in noted:
        lengths.note(str(prompt), tokens)
    for i in range(KEPT_PROMPTS):
        lengths.note(f"later {i}", 7)
    assert {lengths.expected(str(prompt)) for prompt, _ in noted} == {7}


@given(order=ORDERS, requests=st.lists(REQUESTS, min_size=1, max_size=30))
def test_what_continues_goes_first_and_then_the_longest(order: Order, requests: list[ScheduledRequest]) -> None:
    waiting = Waiting(order, 1000, known())
    for request in requests:
        waiting.come(request)
    news = [(i, r.prompt) for i, r in enumerate(requests) if not r.continues]
    probes = {next(i for i, prompt in news if prompt == "d")} if any(prompt == "d" for _, prompt in news) else set()
    unknown = {"fifo": 0.0, "longest_first": 30.0, "probes_first": math.inf}[order]

    def length(i: int, r: ScheduledRequest) -> float:
        return 0 if order == "fifo" or r.continues else MEANS.get(r.prompt, unknown)

    rank = {
        i: (not r.continues, order == "probes_first" and i not in probes, -length(i, r), i) if not r.continues else (False, False, 0, i)
        for i, r in enumerate(requests)
    }
    assert [waiting.take() for _ in requests] == sorted(rank, key=rank.__getitem__)
    assert not len(waiting)


@given(
    order=ORDERS,
    patience=st.integers(0, 5),
    events=st.lists(st.one_of(REQUESTS, st.just("take"), st.integers(0, 1000)), max_size=80),
)
def test_nobody_is_overtaken_more_often_than_patience_allows(order: Order, patience: int, events: Sequence[Any]) -> None:
    waiting, overtaken, ahead, taken = Waiting(order, patience, known()), dict[int, int](), dict[int, int](), Counter[int]()
    for event in events:
        if isinstance(event, ScheduledRequest):
            found = len(overtaken)
            ticket = waiting.come(event)
            overtaken[ticket], ahead[ticket] = 0, found
        elif not overtaken:
            continue
        elif event == "take":
            gone = waiting.take()
            del overtaken[gone]
            for ticket in overtaken:
                overtaken[ticket] += ticket < gone
                taken[ticket] += 1
                assert overtaken[ticket] <= patience
                assert taken[ticket] <= ahead[ticket] + patience
        else:
            given_up = sorted(overtaken)[event % len(overtaken)]
            waiting.give_up(given_up)
            del overtaken[given_up]
        assert len(waiting) == len(overtaken)


@settings(max_examples=examples(400))
@given(
    order=ORDERS,
    limit=st.integers(1, 3),
    requests=st.lists(REQUESTS, min_size=1, max_size=5),
    events=st.lists(st.tuples(st.sampled_from(["cancel", "finish", "tick", "close", "open"]), st.integers(0, 4)), max_size=40),
)
def test_the_gate_loses_no_place(order: Order, limit: int, requests: list[ScheduledRequest], events: list[tuple[str, int]]) -> None:
    asyncio.run(_schedule(Gate(limit, Waiting(order, 4, known())), limit, requests, events))


async def _schedule(gate: Gate, limit: int, requests: list[ScheduledRequest], events: list[tuple[str, int]]) -> None:
    inside: set[int] = set()
    done = [asyncio.Event() for _ in requests]
    is_open = True

    async def one(number: int) -> None:
        async with gate.place(requests[number]):
            assert is_open
            inside.add(number)
            assert len(inside) <= limit
            try:
                await done[number].wait()
            finally:
                inside.remove(number)

    tasks = [asyncio.create_task(one(number)) for number in range(len(requests))]
    for what, number in events:
        if what == "cancel" and number < len(tasks):
            tasks[number].cancel()
        elif what == "finish" and number < len(tasks):
            done[number].set()
        elif what in ("close", "open"):
            is_open = what == "open"
            (gate.open if is_open else gate.close)()
        else:
            await asyncio.sleep(0)
        assert gate.inside <= limit
    is_open = True
    gate.open()
    for event in done:
        event.set()
    async with asyncio.timeout(5):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in ended)
    assert (gate.inside, inside) == (0, set())


class Client(FakeEngine):
    """Answers when it is told to; notes who asked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[tuple[int, ...]] = []
        self.ranks: list[int | None] = []
        self.answers: asyncio.Queue[tuple[int, str] | EngineLost] = asyncio.Queue()

    async def generate(self, tokens: Any, sampling: Sampling, salt: str, timeout_s: float, *rest: Any, **__: Any) -> Generation:
        self.asked.append(tuple(tokens))
        self.ranks.append(rest[-1])
        answer = await self.answers.get()
        if isinstance(answer, EngineLost):
            raise answer
        count, finish = answer
        return generation_of((1,) * count, (-1.0,) * count, (VersionSpan(salt, 0, count),), finish, 0)


def made(count: int, limit: int = 64, **options: Any) -> tuple[Pool, list[Client]]:
    servers, clients = handles(count), [Client(f"engine.{i}") for i in range(count)]
    for server, client in zip(servers, clients, strict=True):
        server.client = client  # type: ignore[misc]
    return Pool(servers, limit, 60.0, lambda *_: None, **options), clients


def ask(pool: Pool, number: int, prompt: str = "", continues: bool = False) -> asyncio.Task[Any]:
    return asyncio.create_task(pool.generate((number,), Sampling(1.0, 100, ()), request=ScheduledRequest(prompt, continues)))


@asynchronous
async def test_a_conversation_goes_on_where_it_is_until_that_engine_is_gone() -> None:
    pool, servers = made(2)

    def begin(episode: int, turn: int) -> asyncio.Task[Any]:
        request = ScheduledRequest("episode 5", turn > 0, conversation=f"{episode}")
        return asyncio.create_task(pool.generate((episode, turn), Sampling(1.0, 100, ()), request=request))

    first = [begin(episode, 0) for episode in range(6)]
    await settle()
    at = {episode: i for i, server in enumerate(servers) for episode, _ in server.asked}
    assert sorted(Counter(at.values()).values()) == [3, 3]
    for server in servers:
        for _ in server.asked:
            server.answers.put_nowait((3, "stop"))
    await asyncio.gather(*first)
    second = [begin(episode, 1) for episode in sorted(at, key=lambda episode: (at[episode] == at[0], episode))]
    await settle()
    assert {episode: i for i, server in enumerate(servers) for episode, turn in server.asked if turn} == at
    servers[0].dead = True
    for _ in range(3):
        servers[0].answers.put_nowait(EngineLost("gone"))
    await settle()
    assert sorted(episode for episode, turn in servers[1].asked if turn) == list(range(6))
    for task in second:
        task.cancel()
    await asyncio.gather(*second, return_exceptions=True)
    assert [member.in_flight for member in pool.members] == [0, 0]


@asynchronous
async def test_a_conversation_goes_on_at_its_data_parallel_rank() -> None:
    pool, (server,) = made(1, dp_ranks=3)

    async def turns(numbers: Sequence[int]) -> list[int | None]:
        """The ranks of the conversations' next turns."""
        seen = len(server.ranks)
        requests = [ScheduledRequest(conversation=f"{number}") for number in numbers]
        tasks = [asyncio.create_task(pool.generate((1,), Sampling(1.0, 9, ()), request=request)) for request in requests]
        await settle()
        for _ in tasks:
            server.answers.put_nowait((3, "stop"))
        await asyncio.gather(*tasks)
        return server.ranks[seen:]

    first = await turns(range(6))
    assert sorted(first) == [0, 0, 1, 1, 2, 2]
    assert await turns((1, 5, 0, 4)) == [first[1], first[5], first[0], first[4]]
    assert pool.members[0].by_dp_rank.total() == 0


def test_only_the_most_recent_entries_are_remembered() -> None:
    recent = Recent[int](3)
    for key, value in (("a", 0), ("b", 0), ("c", 1), ("a", 2), ("d", 1)):
        recent[key] = value
    assert recent == {"c": 1, "a": 2, "d": 1}


@asynchronous
async def test_longest_first_learns_from_whole_responses_that_have_ended() -> None:
    pool, (server,) = made(1, limit=1, order="longest_first")
    for prompt, tokens, finish, sampled in (("short", 2, "stop", 0), ("long", 1, ABORTED, 0), ("long", 1, "stop", 89)):
        server.answers.put_nowait((tokens, finish))
        await pool.generate((0,), Sampling(1.0, 100, ()), request=ScheduledRequest(prompt, sampled > 0, sampled))
    busy = ask(pool, 0)
    waiting = [ask(pool, 1, "short"), ask(pool, 2, "unknown"), ask(pool, 3, "long")]
    await settle()
    for _ in range(4):
        server.answers.put_nowait((46, "stop"))
    await asyncio.gather(busy, *waiting)
    assert [tokens[0] for tokens in server.asked[4:]] == [3, 2, 1]
