"""The capacity law's theorem on random schedules, and the ledger."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncmoe.errors import InvariantBroken
from asyncmoe.queue.admission import Admission, Ledger
from tests.unit.example_counts import examples


@dataclass(eq=False)
class Flying:
    """A group between start and training; `oldest` is the version its first token is sampled with."""

    oldest: int
    arrival: int = -1


class InTime(RuleBasedStateMachine):
    """Any order of starting, finishing, rejecting and publishing, with one promise: what a step needs is there when it is leased."""

    @initialize(max_staleness=st.integers(0, 3), groups=st.integers(1, 3), size=st.integers(1, 3), base=st.integers(0, 5))
    def begin(self, max_staleness: int, groups: int, size: int, base: int) -> None:
        self.law = Admission(groups * size, max_staleness, base)
        self.groups, self.size = groups, size
        self.ledger, self.served, self.trainer = Ledger(), base, base
        self.waiting: list[Flying] = []
        self.running: list[Flying] = []
        self.queued: list[Flying] = []
        self.arrivals = 0

    @rule()
    def start(self) -> None:
        if self.law.may_start(self.ledger, self.size, self.served):
            self.ledger = self.ledger.start(self.size)
            self.waiting.append(Flying(self.served))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def sample_first_token(self, data: st.DataObject) -> None:
        group = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.running.append(Flying(self.served))
        assert group.oldest <= self.served

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self._finish(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.ledger = self.ledger.reject(self.size)

    @precondition(lambda self: len(self.running) + len(self.queued) >= self.groups)
    @rule()
    def train(self) -> None:
        for group in sorted(self.running + self.queued, key=lambda g: g.oldest)[: self.groups]:
            if group in self.running:
                self.running.remove(group)
                self._finish(group)
        self.queued.sort(key=lambda g: (g.oldest, g.arrival))
        batch, self.queued = self.queued[: self.groups], self.queued[self.groups :]
        assert max(self.trainer - g.oldest for g in batch) <= self.law.max_staleness
        assert not any(self.law.is_stale(g.oldest, self.trainer) for g in batch)
        self.ledger = self.ledger.lease(self.law.batch).train(self.law.batch)
        self.trainer += 1

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.served = data.draw(st.integers(self.served, self.trainer))

    def _finish(self, group: Flying) -> None:
        self.arrivals += 1
        group.arrival = self.arrivals
        self.queued.append(group)
        self.ledger = self.ledger.accept(self.size)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "law"):
            assert self.ledger.running == self.size * (len(self.waiting) + len(self.running))
            assert self.ledger.queued == self.size * len(self.queued)
            assert self.ledger.accepted + self.ledger.running <= self.law.capacity(self.trainer)


TestInTime = InTime.TestCase
TestInTime.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_bound_is_reached_and_the_law_stops_right_there(max_staleness: int) -> None:
    law, ledger = Admission(batch=8, max_staleness=max_staleness), Ledger()
    while law.may_start(ledger, 4, 0):
        ledger = ledger.start(4)
    assert ledger.started == 8 * (max_staleness + 1)
    ledger = ledger.accept(ledger.running)
    for trainer in range(max_staleness + 1):
        assert not law.is_stale(0, trainer)
        ledger = ledger.lease(8).train(8)
        assert not law.may_start(ledger, 4, 0)
        assert law.may_start(ledger, 4, trainer + 1)
    assert law.is_stale(0, max_staleness + 1)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 50), st.integers(0, 500))
def test_with_groups_of_one_the_law_is_that_of_the_paper(max_staleness: int, version: int, batch: int, accepted: int) -> None:
    ledger = Ledger(started=accepted, trained=accepted)
    paper = (accepted + 1 - 1) // batch <= version + max_staleness
    assert Admission(batch, max_staleness).may_start(ledger, 1, version) == paper


def test_nothing_starts_before_reinforcement_learning_began() -> None:
    law = Admission(batch=4, max_staleness=9, base_version=3)
    assert [law.may_start(Ledger(), 4, v) for v in range(5)] == [False, False, False, True, True]
    assert law.capacity(3) == 40


MOVES = {
    "accept": ("running", "queued"),
    "reject": ("running", "rejected"),
    "drop": ("queued", "dropped"),
    "lease": ("queued", "leased"),
    "train": ("leased", "trained"),
}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["start", *MOVES]), st.integers(-2, 6)), max_size=60))
def test_transitions_move_what_they_say_or_refuse(moves: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    for name, count in moves:
        before = asdict(ledger)
        source, to = MOVES.get(name, (None, "running"))
        if count <= 0 or (source and before[source] < count):
            with pytest.raises(InvariantBroken):
                getattr(ledger, name)(count)
            continue
        ledger = getattr(ledger, name)(count)
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
