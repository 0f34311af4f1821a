"""Each promise of the queue and of its service, one at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest

from asyncmoe.errors import AsyncmoeError, ConfigError, EngineError, InvariantBroken, ProtocolError, TrajectoryRejected
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.fold import NEW
from asyncmoe.queue.leases import Leases, LeaseTerms
from asyncmoe.queue.service import QueueService
from asyncmoe.rpc import codec
from asyncmoe.rpc.messages import Commit, Done, Goodbye, Hello, Lease, Leased, Request, Welcome
from asyncmoe.trajectory import Trajectory
from benchmarks.unlogged import Unlogged
from tests.unit.asynchronous import asynchronous, settle
from tests.unit.putting import put_group
from tests.unit.test_queue_model import make_group


def group(number: int, version: int = 0, size: int = 2) -> list[Trajectory]:
    return make_group(number, size, [version])


def queue(**changes: Any) -> BoundedQueue:
    return BoundedQueue(Admission(4, changes.pop("max_staleness", 1)), Unlogged(), **({"capacity": 8, "group_size": 2} | changes))


async def filled(*groups: list[Trajectory], **changes: Any) -> BoundedQueue:
    made = queue(max_staleness=9, **changes)
    made.set_version(9)
    for one in groups:
        made.started(len(one))
        await put_group(made, one)
    return made


def names(leased: Leased) -> list[str]:
    return [item.key for item in leased.items]


# ---------------------------------------------------------------- put


@asynchronous
async def test_episodes_of_several_agents_are_counted_once_and_leased_whole() -> None:
    held = queue()
    whole = [(t, agent) for number in (0, 1) for t in group(number) for agent in range(t.episode + 1)]
    both = [dataclasses.replace(t, key=f"{t.key}.a{agent}", agent=agent) for t, agent in whole]
    assert len(both) == 6
    held.started(4)
    for number in (0, 1):
        await put_group(held, [t for t in both if t.group == number])
    assert held.ledger.queued == 4
    leased = await held.lease(0, "rl", 4, 0, 0)
    assert [(i.group, i.episode, i.agent) for i in leased.items] == [(g, e, a) for g in (0, 1) for e in (0, 1) for a in range(e + 1)]
    assert len(leased.items) == 6
    held.commit(0)
    assert held.ledger.trained == 4


@asynchronous
async def test_tokens_from_before_a_restart_may_be_ahead_of_the_trainer_that_catches_up() -> None:
    held = queue(max_staleness=9, resumed=replace(NEW, replays=dict.fromkeys([4])))
    held.started(2)
    await put_group(held, group(0, version=5))
    held.started(2)
    with pytest.raises(TrajectoryRejected, match=r"version_from_future.*the newest is 6"):
        await put_group(held, group(1, version=7))


@asynchronous
async def test_what_is_no_whole_new_group_does_not_get_in() -> None:
    held = await filled(group(0))
    held.started(2)
    before = held.ledger
    for made, said in (
        (group(0), "put twice"),
        ([*group(1), group(1)[0]], "put twice"),
        (group(1, size=1), "put 1 episodes"),
        ([group(1)[0], group(2)[1]], "of groups"),
        (group(1, size=10), "put 10 episodes"),
    ):
        with pytest.raises(InvariantBroken, match=said):
            await put_group(held, made)
    assert held.ledger == before
    assert held.ledger.queued == 2
    held.ended(2, "rejected", "bad_logprob")
    assert held.accounts.rejected == {"bad_logprob": 2}


@asynchronous
async def test_starting_against_the_law_is_refused() -> None:
    held = queue(max_staleness=0)
    held.started(4)
    assert not held.can_start(2)
    with pytest.raises(InvariantBroken, match="capacity law"):
        held.started(2)


@asynchronous
@pytest.mark.parametrize("event", ["version", "rejected"])
async def test_the_producer_wakes_when_it_may_start(event: str) -> None:
    held = queue(max_staleness=0)
    held.started(4)
    waiting = asyncio.create_task(held.wait_can_start(2))
    await settle()
    assert not waiting.done()
    held.set_version(1) if event == "version" else held.ended(2, "rejected", "timeout")
    await waiting
    assert held.can_start(2)


# ---------------------------------------------------------------- lease


@asynchronous
async def test_versions_do_not_go_back() -> None:
    held = queue()
    held.set_version(3)
    with pytest.raises(InvariantBroken, match="version 2 after 3"):
        held.set_version(2)


@asynchronous
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, "rl", 8, 9, 0), ProtocolError, "ranks disagree"),
        ((0, "rl", 4, 10, 0), ProtocolError, "ranks disagree"),
        ((0, "rl", 4, 8, 0), ProtocolError, "got version 8, expected at least 9, which the engines serve"),
        ((0, "warmup", 4, 9, 0), ProtocolError, "ranks disagree"),
        ((1, "rl", 3, 9, 0), ProtocolError, "whole groups of 2"),
        ((1, "rl", 10, 9, 0), ConfigError, "got 10, expected at most the queue's capacity, 8"),
        ((1, "warmup", 1, 9, 0), ConfigError, "got 1, expected at most the queue's capacity, 0"),
        ((1, "rl", 8, 9, 0), ProtocolError, r"4 of 8 are leased to steps \(0,\); commit those first"),
        ((-1, "rl", 4, 9, 0), ProtocolError, "trained already"),
    ],
)
async def test_a_lease_that_cannot_be_is_refused(arguments: tuple[Any, ...], error: type[AsyncmoeError], text: str) -> None:
    held = await filled(group(0), group(1))
    await held.lease(0, "rl", 4, 9, 0)
    before = held.ledger
    with pytest.raises(error, match=text):
        await held.lease(*arguments)
    assert held.ledger == before


@pytest.mark.parametrize("message", [Lease(1, "rl", 0, 9, 0.0), Lease(1, "rl", 4, 9, math.inf), Commit(1, "x" * 101)])
def test_numbers_and_reasons_without_bounds_are_no_messages(message: Request) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        codec.decode_request(codec.encode(message))


@asynchronous
async def test_a_token_newer_than_the_trainer_is_a_broken_invariant() -> None:
    held = await filled(group(0, 3), group(1, 10))
    with pytest.raises(InvariantBroken, match="got a token of version 10, expected at most 9"):
        await held.lease(0, "rl", 4, 9, 0)


@asynchronous
async def test_the_next_step_may_be_leased_ahead() -> None:
    held = await filled(*(group(i) for i in range(4)))
    await held.lease(0, "rl", 4, 9, 0)
    assert names(await held.lease(1, "rl", 4, 9, 0))[0] == "g2.e0"
    with pytest.raises(ProtocolError, match="got step 1, expected step 0 first"):
        held.commit(1)
    held.commit(0)
    held.commit(1)
    assert held.ledger.trained == 8
    assert held.trained_steps == 2


def test_a_rank_learns_that_its_step_ended_while_it_asked() -> None:
    one = LeaseTerms("rl", 4, 1)
    leases = Leases().ask(0, one, 4)
    assert leases.answer_to(0, one) is None
    granted = leases.decide(0, Leased(0, (), 0, {}))
    with pytest.raises(ProtocolError, match="during the request"):
        granted.commit(0).answer_to(0, one)


# ---------------------------------------------------------------- stop, fail, resume, warm-up


@asynchronous
async def test_stop_is_heard_by_all_ranks_at_the_same_step() -> None:
    held = await filled(*(group(i) for i in range(4)))
    granted = await held.lease(0, "rl", 4, 9, 0)
    held.stop()
    assert await held.lease(0, "rl", 4, 9, 0) == granted
    held.commit(0)
    answers = [await held.lease(1, "rl", 4, 9, 60) for _ in range(2)]
    assert all(answer.stop and not answer.items for answer in answers)
    assert held.ledger.queued == 4


@asynchronous
async def test_failure_reaches_everyone_who_waits_but_no_lease_already_granted() -> None:
    held = await filled(*(group(i) for i in range(4)))
    granted = await held.lease(0, "rl", 4, 9, 0)
    held.started(2)
    waiting = [
        asyncio.create_task(put_group(held, group(4))),
        asyncio.create_task(held.wait_can_start(10_000)),
    ]
    await settle()
    held.fail(EngineError("engine 0 died"))
    for task in waiting:
        with pytest.raises(EngineError, match="engine 0 died"):
            await task
    assert await held.lease(0, "rl", 4, 9, 0) == granted
    held.commit(0)
    await held.lease(1, "rl", 4, 9, 0)
    held.commit(1)
    with pytest.raises(EngineError, match="engine 0 died"):
        await held.lease(2, "rl", 4, 9, 60)


# ---------------------------------------------------------------- service


@asynchronous
async def test_hello_refuses_another_configuration_world_or_step() -> None:
    service = QueueService(queue(trained_steps=7), config_digest="a" * 64)
    with pytest.raises(ConfigError, match="configuration of the trainer: got digest bbbbbbbbbbbb, expected the controller's, aaaaaaaaaaaa"):
        await service(Hello(0, 2, "b" * 64, 7))
    with pytest.raises(ProtocolError, match="has taken 6 steps, the controller counts 7"):
        await service(Hello(0, 2, "a" * 64, 6))
    assert await service(Hello(1, 2, "a" * 64, 7)) == Welcome()
    assert await service(Hello(1, 2, "a" * 64, 7)) == Welcome()
    for rank, world in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ProtocolError, match=f"rank {rank} of {world}"):
            await service(Hello(rank, world, "a" * 64, 7))


@asynchronous
async def test_the_trainer_has_left_when_every_rank_has_and_all_say_the_same() -> None:
    service = QueueService(queue(), config_digest="")
    with pytest.raises(ProtocolError, match="goodbye: got rank 0 of a trainer that sent no Hello"):
        await service(Goodbye(0, True))
    await service(Hello(1, 2, "", 0))
    for _ in range(2):
        assert await service(Goodbye(1, True)) == Done()
        assert not service.left
    with pytest.raises(ProtocolError, match="goodbye: got rank 2 of 2"):
        await service(Goodbye(2, True))
    assert await service(Goodbye(0, True)) == Done()
    assert service.left
    with pytest.raises(ProtocolError, match="sent finished=False, another rank sent the opposite"):
        await service(Goodbye(0, False))
