"""The capacity law's theorem on random schedules, and the ledger."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import InvariantBroken
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Admission, Ledger


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 5), st.randoms(use_true_random=False))
def test_what_a_step_trains_is_young_enough_if_it_is_there_when_the_step_is_leased(eta: int, groups: int, base: int, draw: Random) -> None:
    """The theorem, on random schedules of groups of two that start, fail and are trained, oldest first, while versions are published."""
    law, ledger, served, trainer = Admission(2 * groups, eta, base), Ledger(), base, base
    alive: list[int] = []
    for _ in range(100):
        what = draw.choice(("start", "start", "fail", "train", "publish"))
        if what == "start" and law.may_start(ledger, 2, served):
            ledger = ledger.start(2)
            alive.append(draw.randint(served, trainer))  # its first token may be of a later version
        elif what == "fail" and alive:
            alive.remove(draw.choice(alive))
            ledger = ledger.move(2, "running", "rejected")
        elif what == "train" and len(alive) >= groups:
            batch, alive = sorted(alive)[:groups], sorted(alive)[groups:]
            assert trainer - batch[0] <= eta
            assert not law.is_stale(batch[0], trainer)
            ledger = ledger.move(2 * groups, "running", "queued").move(2 * groups, "queued", "leased").move(2 * groups, "leased", "trained")
            trainer += 1
        elif what == "publish":
            served = draw.randint(served, trainer)
        assert ledger.running == 2 * len(alive)
        assert ledger.accepted + ledger.running <= law.capacity(trainer)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 50), st.integers(0, 500))
def test_with_groups_of_one_the_law_is_that_of_the_paper(max_staleness: int, version: int, batch: int, accepted: int) -> None:
    ledger = Ledger(started=accepted, trained=accepted)
    paper = (accepted + 1 - 1) // batch <= version + max_staleness
    assert Admission(batch, max_staleness).may_start(ledger, 1, version) == paper


START = None, "running"
MOVES = [("running", "queued"), ("running", "rejected"), ("queued", "dropped"), ("queued", "leased"), ("leased", "trained")]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([START, *MOVES]), st.integers(-2, 6)), max_size=60))
def test_transitions_move_what_they_say_or_refuse(moves: list[tuple[Any, int]]) -> None:
    ledger = Ledger()
    for (source, to), count in moves:
        before, moved = asdict(ledger), partial(ledger.move, source=source, to=to) if source else ledger.start
        if count <= 0 or (source and before[source] < count):
            with pytest.raises(InvariantBroken):
                moved(count)
            continue
        ledger = moved(count)
        expected = before | {to: before[to] + count}
        expected |= {source: before[source] - count} if source else {"started": before["started"] + count}
        assert asdict(ledger) == expected
        assert ledger.accepted == ledger.queued + ledger.leased + ledger.trained


def test_a_ledger_that_does_not_add_up_cannot_be_made() -> None:
    good = Ledger(started=6, running=1, queued=1, leased=1, trained=1, dropped=1, rejected=1)
    for field in fields(Ledger):
        for change in (-2, -1, 1):
            with pytest.raises(InvariantBroken):
                replace(good, **{field.name: getattr(good, field.name) + change})


def test_reasons_add_up_to_the_ledger() -> None:
    accounts = Accounts(Ledger().start(4)).end(1, "running", "rejected", "score").end(1, "running", "dropped", "equal")
    accounts = accounts.end(1, "running", "rejected", "score")
    assert (accounts.rejected, accounts.dropped) == ({"score": 2}, {"equal": 1})
    with pytest.raises(InvariantBroken, match="do not add up"):
        Accounts(accounts.ledger, dropped=accounts.dropped)
