"""A queue with a log, stopped anywhere, resumes: finished groups are kept, leased ones are leased again, none ends twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.errors import DataError, ProtocolError
from asyncmoe.log.files import HEADER_BYTES
from asyncmoe.log.log import HEAD_BYTES
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import pack
from asyncmoe.queue.records import Start
from tests.unit.asynchronous import asynchronous
from tests.unit.log_lives import BATCH, SIZE, Home, Life, home, live  # noqa: F401
from tests.unit.test_queue_model import make_group

FILES = Home()


@asynchronous
async def test_a_lease_is_answered_only_once_it_is_durable(home: Home, tmp_path: Path) -> None:  # noqa: F811
    life = await live(home, tmp_path / "run")
    for number in range(2):
        await life.group(number)
    leased = await life.lease(0)
    home.copy(tmp_path / "run", tmp_path / "copy")  # without waiting for anything
    life.log.close()
    again = await live(home, tmp_path / "copy")
    assert again.queue.ledger.leased == BATCH
    assert (await again.lease(0)).items == leased.items
    again.log.close()


@asynchronous
@pytest.mark.parametrize(("rule", "starts"), [("drop", []), ("requeue", [Start(0, 1)])])
async def test_what_was_too_old_stays_so(tmp_path: Path, rule: Any, starts: list[Start]) -> None:
    life = await live(FILES, tmp_path / "run", rule=rule)
    await life.group(0)
    life.queue.set_version(4)
    for number in (1, 2):
        await life.group(number, (4, 4))
    leased = await life.queue.lease(0, "rl", BATCH, 4, 5.0)
    assert {item.group for item in leased.items} == {1, 2}
    again = await live(FILES, life.kill(tmp_path / "again"), rule=rule)
    assert again.starts == starts
    assert again.queue.ledger.queued == 0
    assert getattr(again.queue.ledger, "dropped" if rule == "drop" else "requeued") == SIZE
    again.log.close()


@asynchronous
async def test_a_run_goes_back_to_an_older_checkpoint_and_no_further(home: Home, tmp_path: Path) -> None:  # noqa: F811
    life = await live(home, tmp_path / "run")
    answers = [await life.train(step) for step in range(8)]
    assert await life.log.forget(6) > 0
    size = life.log.size
    home.copy(tmp_path / "run", tmp_path / "far")
    again = await live(home, life.kill(tmp_path / "again"), 6)
    assert again.log.size <= size + (1 << 12)
    for step in (6, 7):
        assert (await again.lease(step)).items == answers[step].items
        again.queue.commit(step)
    assert again.queue.ledger.trained == 8 * BATCH
    again.log.close()
    far = home.opened(tmp_path / "far")
    with pytest.raises(DataError, match=r"got a log of steps 6 to 8, expected step 5, .*; delete log .*: queued and unfinished episodes"):
        far.begin(5, 0, BATCH, 0)
    with pytest.raises(DataError, match="expected step 9, where the checkpoint is"):
        far.begin(9, 0, BATCH, 0)
    far.close()


@asynchronous
@pytest.mark.parametrize("recorded", [0, 20])
async def test_space_is_bounded(home: Home, tmp_path: Path, recorded: int) -> None:  # noqa: F811
    life, sizes = await live(home, tmp_path / "run"), []
    for step in range(60):
        await life.train(step)
        if step % 5 == 4:
            await life.log.forget(step - 4, max(0, step - 4 - recorded))
            sizes.append(life.log.size)
    assert max(sizes) < 2 * min(sizes[1 + recorded // 5 :])
    again = await live(home, life.kill(tmp_path / "again"), 57)
    assert again.queue.ledger.leased == 3 * BATCH
    assert 35 < again.log.state.recorded_since(60) + recorded <= 55
    for place in again.log.state.recorded[55 - recorded].oldest:
        again.log.payloads.read_at(place.position)  # raises if it was deleted
    assert await again.log.forget(57) > 50 * recorded
    again.log.close()


# ---------------------------------------------------------------- a trainer that is lost alone


async def back_to(life: Life, step: int) -> None:
    life.queue.trainer_lost()
    life.queue.reopen(step, life.log.reopening(step, 0, BATCH))


def read_slowly(life: Life) -> asyncio.Event:
    """Have a log's groups come only once the event is set."""
    read, going = life.log.groups, asyncio.Event()

    async def slow(recorded: Any) -> Any:
        found = await read(recorded)
        await going.wait()
        return found

    life.log.groups = slow  # type: ignore[method-assign]
    return going


@asynchronous
async def test_what_the_lost_trainer_waits_for_is_refused_and_takes_nothing_from_the_next_one(tmp_path: Path) -> None:
    life = await live(FILES, tmp_path / "run")
    await life.train(0)
    waiting = asyncio.create_task(life.lease(1))
    await asyncio.sleep(0.01)
    life.queue.trainer_lost()
    for number in (2, 3):
        await life.group(number, (1, 1))
    life.queue.reopen(1, life.log.reopening(1, 0, BATCH))
    with pytest.raises(ProtocolError, match="its trainer lost, during the request"):
        await waiting
    assert life.queue.ledger.queued == BATCH
    assert {item.group for item in (await life.lease(1)).items} == {2, 3}
    life.log.close()


@asynchronous
async def test_a_batch_that_is_read_for_a_trainer_that_is_lost_is_read_again_for_the_next(tmp_path: Path) -> None:
    life = await live(FILES, tmp_path / "run")
    leases = [await life.train(step) for step in range(2)]
    await back_to(life, 0)
    going = read_slowly(life)
    old = asyncio.create_task(life.lease(0))
    await asyncio.sleep(0.01)
    await back_to(life, 0)
    going.set()
    with pytest.raises(ProtocolError):
        await old
    for step in range(2):
        assert (await life.lease(step)).items == leases[step].items
        life.queue.commit(step)
    life.log.close()


@asynchronous
async def test_a_trainer_that_asks_for_another_batch_than_was_leased_is_refused(tmp_path: Path) -> None:
    life = await live(FILES, tmp_path / "run")
    await life.train(0)
    await back_to(life, 0)
    with pytest.raises(DataError, match="as when it was leased first"):
        await life.queue.lease(0, "rl", 2 * BATCH, 0, 0.0)
    life.log.close()


@asynchronous
async def test_a_run_that_stops_while_a_batch_is_read_stops_every_rank(tmp_path: Path) -> None:
    life = await live(FILES, tmp_path / "run")
    await life.train(0)
    await back_to(life, 0)
    going = read_slowly(life)
    one = asyncio.create_task(life.lease(0))
    await asyncio.sleep(0.01)
    life.queue.stop()
    other = await life.lease(0)
    going.set()
    assert other.stop
    assert await one == other
    life.log.close()


@asynchronous
async def test_demonstrations_begin_again_at_the_checkpoint(tmp_path: Path) -> None:
    log = FILES.opened(tmp_path / "run")
    log.begin(0, 4, BATCH, 0)
    held = BoundedQueue(Admission(BATCH, 0, 4), log, capacity=BATCH, group_size=SIZE, demonstrations=2)
    for number in range(2):
        await held.put_demonstrations([pack(make_group(number, 1, [0]))[0]])
    first = await held.lease(0, "warmup", 2, 0, 0.0)
    held.commit(0)
    for number in range(2, 4):
        await held.put_demonstrations([pack(make_group(number, 1, [0]))[0]])
    blocked = asyncio.create_task(held.put_demonstrations([pack(make_group(4, 1, [0]))[0]]))
    await held.lease(1, "warmup", 2, 1, 0.0)
    await asyncio.sleep(0.01)
    held.trainer_lost()
    held.reopen(0, log.reopening(0, 4, BATCH))
    await blocked  # into what is forgotten
    for number in range(2):
        await held.put_demonstrations([pack(make_group(number, 1, [0]))[0]])
    assert (await held.lease(0, "warmup", 2, 0, 0.0)).items == first.items
    log.close()


# ---------------------------------------------------------------- damage


@asynchronous
@pytest.mark.parametrize("leased", [False, True])
async def test_a_group_whose_payload_is_damaged_starts_again_and_nothing_else_is_lost(tmp_path: Path, leased: bool) -> None:
    life = await live(FILES, tmp_path / "run")
    for number in range(6):
        await life.group(number)
    if leased:
        for step in range(2):
            await life.lease(step)
            life.queue.commit(step)
    place = life.log.state.groups[0].place
    copy = life.kill(tmp_path / "again")
    with min((copy / "log" / "1").glob("*.segment")).open("r+b") as file:
        file.seek(place.position + 200)
        file.write(b"damage")
    again = await live(FILES, copy)
    assert again.starts == [Start(0, 1)]
    assert again.queue.ledger.queued == 5 * SIZE
    assert again.queue.accounts.requeued == {"restart": SIZE}
    assert [item.group for item in (await again.lease(0)).items] == [1, 1, 2, 2]
    last = await live(FILES, again.kill(tmp_path / "last"))
    assert last.starts == [Start(0, 1)]
    assert [item.group for item in (await last.lease(0)).items] == [1, 1, 2, 2]
    last.log.close()


@asynchronous
async def test_groups_of_weights_that_a_damaged_lease_made_start_again(tmp_path: Path) -> None:
    """The trainer cannot come to those weights again: it would be given tokens of its own future."""
    life = await live(FILES, tmp_path / "run")
    for step in range(2):
        await life.train(step)
    for number in (4, 5):
        await life.group(number, (2, 2))
    await life.lease(2)
    life.begin(6)
    lease = life.log.state.leases[1].position
    copy = life.kill(tmp_path / "again")
    segment = [path for path in sorted((copy / "log" / "0").glob("*.segment")) if int(path.stem) <= lease][-1]
    with segment.open("r+b") as file:
        file.seek(HEADER_BYTES + lease - int(segment.stem) + HEAD_BYTES + 2)
        file.write(b"damage")
    again = await live(FILES, copy, rule="requeue")
    assert again.starts == [Start(4, 1), Start(5, 1), Start(6)]
    await again.lease(0)
    again.queue.commit(0)
    again.queue.set_version(1)
    assert [item.group for item in (await again.lease(1)).items] == [2, 2, 3, 3]
    again.log.close()
