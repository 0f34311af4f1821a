"""A trainer that is lost and started again gets its batches since the checkpoint from a queue that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncmoe.errors import DataError, ProtocolError
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rpc.messages import Leased
from tests.unit.test_journal import BATCH, SIZE, Life, in_loop, kill, live, opened
from tests.unit.test_queue_model import make_group


async def trained(folder: Path, steps: int) -> tuple[Life, list[Leased]]:
    """A queue whose trainer has taken some steps and published each; and its batches."""
    life, leases = await live(folder), []
    for step in range(steps):
        for number in (2 * step, 2 * step + 1):
            await life.group(number, (step, step))
        leases.append(await life.lease(step))
        life.queue.commit(step)
        life.queue.set_version(step + 1)
    return life, leases


async def back_to(life: Life, step: int) -> None:
    life.queue.trainer_lost()
    life.queue.reopen(await life.journal.now(step, 0))


def test_it_gets_the_same_batches_while_groups_go_on_to_be_queued(tmp_path: Path) -> None:
    async def body() -> None:
        life, leases = await trained(tmp_path / "run", 3)
        for number in (6, 7):
            await life.group(number, (3, 3))
        leases.append(await life.lease(3))  # it was lost while it trained on this one
        life.begin(8)
        await back_to(life, 1)
        await life.queue.put_group(make_group(8, SIZE, [3, 3]))
        assert (life.queue.trained_steps, life.queue.version, life.journal.lineage) == (1, 3, 1)
        ledger = life.queue.ledger
        assert (ledger.trained, ledger.leased, ledger.queued, ledger.running) == (BATCH, 3 * BATCH, SIZE, 0)
        for step in (1, 2, 3):
            again = [await life.lease(step) for _ in range(2)]
            assert again[0] == again[1]
            assert (again[0].items, again[0].lineage, again[0].replayed) == (leases[step].items, 1, True)
            life.queue.fetch(step, [item.key for item in again[0].items])
            life.queue.commit(step)
        await life.group(9, (3, 3))
        new = await life.lease(4)
        assert ({item.group for item in new.items}, new.replayed) == ({8, 9}, False)
        assert life.queue.ledger.trained == 4 * BATCH
        kill(life, tmp_path / "run", tmp_path / "again")
        life.journal.close()
        later = await live(tmp_path / "again", 4)
        assert (later.queue.ledger.trained, later.queue.ledger.leased, later.journal.lineage) == (4 * BATCH, BATCH, 2)
        later.journal.close()

    in_loop(body())


def test_what_the_lost_trainer_waits_for_is_refused_and_takes_nothing_from_the_next_one(tmp_path: Path) -> None:
    async def body() -> None:
        life, _ = await trained(tmp_path / "run", 1)
        waiting = asyncio.create_task(life.lease(1))
        await asyncio.sleep(0.01)
        life.queue.trainer_lost()
        for number in (2, 3):
            await life.group(number, (1, 1))
        life.queue.reopen(await life.journal.now(1, 0))
        with pytest.raises(ProtocolError, match="committed or released during the request"):
            await waiting
        assert life.queue.ledger.queued == BATCH
        assert {item.group for item in (await life.lease(1)).items} == {2, 3}
        life.journal.close()

    in_loop(body())


def test_a_batch_that_is_read_for_a_trainer_that_is_lost_is_read_again_for_the_next(tmp_path: Path) -> None:
    async def body() -> None:
        life, leases = await trained(tmp_path / "run", 2)
        await back_to(life, 0)
        read, going = life.journal.groups, asyncio.Event()

        async def slow(numbers: Sequence[int]) -> tuple[Group, ...]:
            found = await read(numbers)
            await going.wait()
            return found

        life.journal.groups = slow  # type: ignore[method-assign]
        old = asyncio.create_task(life.lease(0))
        await asyncio.sleep(0.01)
        await back_to(life, 0)
        going.set()
        with pytest.raises(ProtocolError):
            await old
        for step in range(2):
            assert (await life.lease(step)).items == leases[step].items
            life.queue.commit(step)
        life.journal.close()

    in_loop(body())


def test_a_checkpoint_that_the_journal_does_not_reach_changes_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        life, leases = await trained(tmp_path / "run", 3)
        await life.journal.forget(2)
        before = life.queue.stats()
        with pytest.raises(DataError, match="got a journal of steps 2 to 3, expected step 1"):
            await back_to(life, 1)
        assert life.queue.stats() == before
        await back_to(life, 2)
        assert (await life.lease(2)).items == leases[2].items
        life.journal.close()

    in_loop(body())


def test_demonstrations_begin_again_at_the_checkpoint(tmp_path: Path) -> None:
    async def body() -> None:
        journal = opened(tmp_path / "run")
        journal.begin(0, 4, BATCH, 0)
        held = BoundedQueue(
            capacity=BATCH, batch=BATCH, group_size=SIZE, max_staleness=0, base_version=4, demonstrations=2, journal=journal
        )
        for number in range(2):
            await held.put_demonstrations(make_group(number, 1, [0]))
        first = await held.lease(0, "warmup", 2, 0, 0.0)
        held.commit(0)
        for number in range(2, 4):
            await held.put_demonstrations(make_group(number, 1, [0]))
        blocked = asyncio.create_task(held.put_demonstrations(make_group(4, 1, [0])))
        await held.lease(1, "warmup", 2, 1, 0.0)
        held.trainer_lost()
        held.reopen(await journal.now(0, 4))
        await blocked  # into what is forgotten
        assert held.stats().demonstrations == 0
        for number in range(2):
            await held.put_demonstrations(make_group(number, 1, [0]))
        assert (await held.lease(0, "warmup", 2, 0, 0.0)).items == first.items
        journal.close()

    in_loop(body())
