"""The fold over records: contradictions stop a run, and whichever records are lost, no group is trained twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import InvariantBroken
from asyncmoe.log.log import Place
from asyncmoe.queue import records
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Ledger
from asyncmoe.queue.fold import LogState, RecordedGroup, RecordedLease, fold, recover
from asyncmoe.queue.records import GroupFinished, LeasedGroup, LogEntry, Start, StepLeased
from tests.unit.log_lives import BATCH, SIZE, Home, live


@cache
def run_of_steps() -> tuple[tuple[int, LogEntry], ...]:
    """The records of a run of four steps, the third skipped, with every kind of change."""

    async def body(folder: Path) -> tuple[tuple[int, LogEntry], ...]:
        life = await live(Home(), folder)
        for step in range(4):
            await life.train(step, "anomaly_loss" if step == 2 else "")
        for number in (8, 9):
            await life.group(number, (4, 4))
        for number in (10, 11, 12):
            life.begin(number)
        life.queue.ended(SIZE, "rejected", "engine_died")
        life.log.starts(Start(10, 1, 1))
        life.queue.ended(SIZE, "dropped", "equal_rewards")
        life.log.ended(11)
        await life.lease(4)
        life.log.close()
        changes = Home().log(folder, "0")
        found = tuple((at, records.entry(data)) for at, data in changes.read())
        changes.close()
        return found

    with TemporaryDirectory() as folder:
        return asyncio.run(body(Path(folder)))


@settings(max_examples=300, deadline=None)
@given(lost=st.sets(st.integers(0, 40), max_size=6), run=st.tuples(st.integers(0, 40), st.integers(0, 12)), k=st.integers(0, 4))
def test_whatever_records_are_lost_no_group_is_trained_twice_and_the_ledger_adds_up(lost: set[int], run: tuple[int, int], k: int) -> None:
    whole = run_of_steps()
    gone = lost | set(range(run[0], sum(run)))
    left = [one for number, one in enumerate(whole) if number not in gone]
    leased = {one.change.step: one.change for _, one in whole if isinstance(one.change, StepLeased)}
    trained = {group.number for step, lease in leased.items() if step < k for group in lease.groups}
    state = fold(iter(left))
    state.damaged |= len(left) < len(whole)
    found = recover(state, k, 0, BATCH, "log")
    assert found.history == bool(found.replays)
    assert recover(state, k, 0, BATCH, "log", same=True).history == bool(found.replays and state.damaged), "later weights are lost"
    groups = [one.number for one in found.queued] + [one.number for lease in found.replays.values() for one in lease.groups]
    assert not trained & {*groups, *(one.number for one in found.starts)}
    assert len(groups) == len(set(groups))
    assert all(leased[step] == lease for step, lease in found.replays.items())
    ledger = found.accounts.ledger
    assert (ledger.queued, ledger.leased) == (SIZE * len(found.queued), BATCH * len(found.replays))
    assert ledger.trained + ledger.skipped == k * BATCH
    if not gone & set(range(len(whole))):
        assert not found.repairs
        assert set(range(k, 5)) == set(found.replays)
    again = replace(state, damaged=False)
    again.apply(10**6, records.RunStands(found.first, 0, 0))
    for change in found.repairs:
        again.apply(10**6, change)
    assert not recover(again, k, 0, BATCH, "log", lost={-1}).repairs, "damage is dealt with once"


@settings(max_examples=200, deadline=None)
@given(lost=st.sets(st.integers(0, 40), min_size=1, max_size=30), k=st.integers(4, 5))
def test_damage_to_what_only_the_recorded_window_needs_changes_no_resume(lost: set[int], k: int) -> None:
    whole = run_of_steps()
    state = fold(iter(whole))
    state.forget(4)
    stands = records.RunStands(4, state.next, 0, state.needed(1 << 20))
    after = [*whole, (1 << 20, LogEntry(stands, whole[-1][1].accounts))]
    old = {number for number, (at, _) in enumerate(after) if at < stands.since}
    assert len(old) > 10
    left = [one for number, one in enumerate(after) if number not in lost & old]
    expected, found = (recover(fold(iter(one)), k, 0, BATCH, "log") for one in (after, left))
    assert found == expected


PLACE = Place(1, 0)
ACCOUNTS = Accounts(Ledger(started=8, leased=4, queued=4))


def lease(step: int, *numbers: int) -> RecordedLease:
    groups = tuple(LeasedGroup(number, 1.0, (), number, SIZE, PLACE) for number in numbers)
    return RecordedLease(0, numbers, StepLeased(step, BATCH, step, 0, groups))


def group(number: int, step: int | None = None) -> RecordedGroup:
    return RecordedGroup(number, order=number, episodes=SIZE, place=PLACE, step=step)


SKIPPED = Accounts(Ledger(started=4, skipped=4), skipped={"anomaly_loss": 4})


@pytest.mark.parametrize(
    "state",
    [
        LogState({}, {0: lease(0), 2: lease(2)}, first=0),
        LogState({0: group(0, 0), 1: group(1)}, {0: lease(0, 0, 1)}, first=0, accounts=ACCOUNTS),
        LogState({0: group(0)}, first=0, accounts=Accounts(Ledger())),
        LogState({0: group(0)}, first=0),
        LogState({}, first=0, accounts=SKIPPED),
        LogState({0: group(0, 0), 1: group(1, 0)}, {0: replace(lease(0, 0, 1), ended="x")}, first=0, accounts=SKIPPED),
    ],
)
def test_records_that_contradict_each_other_stop_the_run(state: LogState) -> None:
    with pytest.raises(InvariantBroken):
        recover(state, 0, 0, BATCH, "log L")


def test_a_warm_up_that_is_trained_again_replays_all_of_what_came_after() -> None:
    state = LogState({n: group(n, 10) for n in (0, 1)}, {10: lease(10, 0, 1)}, 10, 2, 3, accounts=Accounts(Ledger(started=4, leased=4)))
    found = recover(state, 4, 10, BATCH, "log")
    assert (list(found.replays), found.history, found.accounts.ledger) == ([10], 4, Ledger(started=4, leased=4))


def test_a_log_whose_oldest_segment_was_deleted_is_damaged() -> None:
    stands = records.RunStands(0, 0, 0)
    whole = [(0, LogEntry(stands)), (60, LogEntry(Start(0))), (99, LogEntry(GroupFinished(0, 1, 0, SIZE, PLACE)))]
    assert not fold(iter(whole)).damaged
    assert fold(iter(whole[1:])).damaged
    assert recover(fold(iter(whole[1:])), 0, 0, BATCH, "log").queued
