"""Every combination of the queue's policies on random schedules: bounds never broken, never stuck, every trajectory accounted for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncmoe.errors import ConfigError, InvariantBroken
from asyncmoe.queue.admission import Admission, Ledger
from asyncmoe.queue.group_state import Gathering, all_equal
from asyncmoe.queue.start_order import Admit, Line, Start
from tests.unit.example_counts import examples

ATTEMPTS = 3


@dataclass(eq=False)
class One:
    """A trajectory: `began` is the version served when it started, `oldest` that of its first token."""

    member: int
    attempt: int
    began: int
    oldest: int = -1
    fate: str = "running"


@dataclass(eq=False)
class Flight:
    start: Start
    state: Gathering
    running: list[One] = field(default_factory=list)
    done: list[One] = field(default_factory=list)
    began: int = 1 << 30
    """Version served when the first of those that may be trained was started."""

    @property
    def oldest(self) -> int:
        return min(one.oldest for one in self.done)


class Policies(RuleBasedStateMachine):
    """The pure policies, composed as the queue and the producer compose them, against a list of single trajectories."""

    @initialize(
        max_staleness=st.integers(0, 2),
        beyond=st.integers(1, 2),
        groups=st.integers(1, 3),
        size=st.integers(1, 3),
        spare=st.integers(0, 2),
        which=st.sampled_from(["drop", "requeue", "downweight"]),
        unit=st.sampled_from(["group", "trajectory"]),
        base=st.integers(0, 2),
    )
    def begin(self, max_staleness: int, beyond: int, groups: int, size: int, spare: int, which: str, unit: str, base: int) -> None:
        limit = max_staleness + beyond if which == "downweight" else None
        self.law = Admission(groups * size, max_staleness, base, which, 0.5 if limit else 1.0, limit)  # type: ignore[arg-type]
        self.groups, self.size = groups, size
        self.ledger, self.line = Ledger(), Line(0, unit, size, spare)  # type: ignore[arg-type]
        self.served = self.trainer = base
        self.all: list[One] = []
        self.flights: dict[Start, Flight] = {}
        self.queued: list[Flight] = []
        self.trained: list[Flight] = []
        self.requeued: list[Start] = []
        self.asked: Counter[int] = Counter()

    # -------------------------------------------------- engines

    @rule()
    def start(self) -> None:
        if not self.law.may_start(self.ledger, self.line.places, self.served):
            return
        self.line, admit = self.line.again(*self.requeued).take()
        self.requeued = []
        self.ledger = self.ledger.start(admit.count)
        if admit.spare:
            self.ledger = self.ledger.start_spare(admit.spare)
        flight = self.flights.setdefault(admit.group, Flight(admit.group, Gathering(self.size)))
        flight.state = flight.state.admit(admit.count, admit.spare)
        flight.began = min(flight.began, self.served)
        born = [One(member, admit.attempt, self.served) for member in admit.members]
        flight.running += born
        self.all += born
        self.asked[admit.group.number] += 1

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        flight, one = data.draw(st.sampled_from(self.flying))
        self._finish(flight, one, data.draw(st.integers(one.began, self.served)), equal=data.draw(st.integers(0, 4)) == 0)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), of_use=st.booleans())
    def fail(self, data: st.DataObject, of_use: bool) -> None:
        flight, one = data.draw(st.sampled_from(self.flying))
        failures = flight.start.failures + one.attempt - flight.start.attempt + 1
        of_use = of_use and failures < ATTEMPTS
        places = flight.state.places
        flight.state, fate = flight.state.fail(of_use and self.line.unit == "trajectory")
        flight.running.remove(one)
        one.fate = "rejected"
        if fate == "spared":
            self.ledger = self.ledger.reject_spare(1)
        elif fate == "again":
            self.ledger = self.ledger.reject(1)
            self.line = self.line.again_alone(flight.start, one.member, one.attempt + 1)
        else:
            assert places == len(flight.running) + len(flight.done) + 1
            self.ledger = self.ledger.reject(places)
            self.line = self.line.forget(flight.start)
            if of_use:
                self.line = self.line.again(Start(flight.start.number, one.attempt + 1, failures))
            self._end(flight, "rejected")
            del self.flights[flight.start]

    @rule(rounds=st.integers(1, 12))
    def leave_a_straggler_behind(self, rounds: int) -> None:
        """The newest finish first and are trained, so that the oldest come late, as old as they can get."""
        for _ in range(rounds):
            self.served = self.trainer
            self.start()
            for flight, one in [(f, o) for f, o in self.flying if f is not self.flying[0][0]]:
                if one in flight.running:
                    self._finish(flight, one, self.served, equal=False)
            self.train(False)
        for flight, one in self.flying[:1]:
            self._finish(flight, one, one.began, equal=False)

    # -------------------------------------------------- trainer

    @rule(dies=st.booleans())
    def train(self, dies: bool) -> None:
        stale = [f for f in self.queued if self.law.is_stale(f.oldest, self.trainer)]
        self.queued = sorted((f for f in self.queued if f not in stale), key=lambda f: f.oldest)
        for flight in stale:
            again = self.law.rule == "requeue"
            self.ledger = self.ledger.requeue(self.size) if again else self.ledger.drop(self.size)
            self._end(flight, "requeued" if again else "dropped")
            if again:
                self.requeued.append(Start(flight.start.number, max(one.attempt for one in flight.done) + 1))
        if len(self.queued) < self.groups:
            return
        batch = self.queued[: self.groups]
        self.ledger = self.ledger.lease(self.law.batch)
        if dies:
            self.ledger = self.ledger.release(self.law.batch)
            return
        self.queued = self.queued[self.groups :]
        for flight in batch:
            age = max(self.trainer - one.oldest for one in flight.done)
            assert age <= (self.law.max_staleness if self.law.rule != "downweight" else self.law.drop_above)
            assert self.law.weight(flight.oldest, self.trainer) == 0.5 ** max(0, age - self.law.max_staleness)
            self._end(flight, "trained")
        self.trained += batch
        self.ledger = self.ledger.train(self.law.batch)
        self.trainer += 1

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.served = data.draw(st.integers(self.served, self.trainer))

    # -------------------------------------------------- what always holds

    @invariant()
    def every_trajectory_is_in_one_place(self) -> None:
        if not hasattr(self, "law"):
            return
        fates, ledger = Counter(one.fate for one in self.all), self.ledger
        assert ledger.started == len(self.all)
        assert ledger.trained == fates["trained"]
        assert ledger.dropped == fates["dropped"]
        assert ledger.rejected == fates["rejected"]
        assert ledger.requeued == fates["requeued"]
        assert ledger.queued == self.size * len(self.queued)
        assert ledger.running + ledger.spare + ledger.queued == fates["running"]
        assert all(
            n <= 1 for n in Counter((f.start.number, o.member, o.attempt) for f in self.flights.values() for o in f.running).values()
        )

    @invariant()
    def no_version_begins_more_groups_than_its_steps_can_train(self) -> None:
        if hasattr(self, "law"):
            alive = [*self.flights.values(), *self.queued, *self.trained]
            for version in range(self.law.base_version, self.served + 1):
                assert self.size * sum(f.began <= version for f in alive) <= self.law.capacity(version)

    @invariant()
    def something_can_proceed(self) -> None:
        if hasattr(self, "law") and not self.flying and self.served == self.trainer:
            ready = sum(not self.law.is_stale(f.oldest, self.trainer) for f in self.queued)
            stale = len(self.queued) - ready
            assert ready >= self.groups or stale or self.law.may_start(self.ledger, self.line.places, self.served)

    def teardown(self) -> None:
        """From any state engines that answer and a trainer that goes on make steps: nobody starves."""
        if not hasattr(self, "law"):
            return
        until = self.trainer + 2
        owed = [*self.requeued, *self.line.groups]
        asked = Counter(self.asked)
        for _ in range(400):
            self.served = self.trainer
            self.start()
            if self.flying:
                flight, one = self.flying[0]
                self._finish(flight, one, self.served, equal=False)
            elif self.law.may_start(self.ledger, self.line.places, self.served):
                continue
            else:
                self.train(False)
            if self.trainer >= until and all(self.asked[s.number] > asked[s.number] for s in owed):
                return
        raise AssertionError("no progress")

    # -------------------------------------------------- inside

    @property
    def flying(self) -> list[tuple[Flight, One]]:
        return [(flight, one) for flight in self.flights.values() for one in flight.running]

    def _finish(self, flight: Flight, one: One, oldest: int, equal: bool) -> None:
        flight.running.remove(one)
        flight.done.append(one)
        one.oldest = oldest
        flight.state = flight.state.finish()
        if not flight.state.whole:
            return
        assert len(flight.running) == flight.state.spare
        if flight.state.spare:
            self.ledger = self.ledger.discard_spare(flight.state.spare)
        for rest in flight.running:
            rest.fate = "dropped"
        flight.running = []
        del self.flights[flight.start]
        if equal:
            self.ledger = self.ledger.discard(self.size)
            self._end(flight, "dropped")
        else:
            self.ledger = self.ledger.accept(self.size)
            self.queued.append(flight)

    def _end(self, flight: Flight, fate: str) -> None:
        for one in flight.running + flight.done:
            one.fate = fate


TestPolicies = Policies.TestCase
TestPolicies.settings = settings(max_examples=examples(120), stateful_step_count=50, deadline=None)


def test_the_order_is_members_then_the_open_group_then_groups_again_then_new_ones() -> None:
    line = Line(7, "trajectory", 2, spare=1).again(Start(3, 1))
    line, first = line.take()
    assert first == Admit(Start(3, 1), 0, 1, 1)
    line, member = line.again_alone(Start(3, 1), 0, 2).again(Start(4, 1)).take()
    assert member == Admit(Start(3, 1), 0, 1, 2)
    line, last = line.take()
    assert last == Admit(Start(3, 1), 1, 1, 1, spare=1)
    assert list(last.members) == [1, 2]
    line, other = line.take()
    assert (other.group, other.first) == (Start(4, 1), 0)
    line, new = line.forget(Start(4, 1)).take()
    assert new.group == Start(7)


def test_groups_that_start_whole_take_all_places_at_once_and_have_no_members_alone() -> None:
    line, admit = Line(0, "group", 3, spare=2).take()
    assert admit == Admit(Start(0), 0, 3, 0, spare=2)
    with pytest.raises(InvariantBroken, match="cannot start alone"):
        line.again_alone(Start(0), 1, 1)


def test_a_group_falls_only_when_no_spare_response_is_left() -> None:
    group = Gathering(2).admit(2, 1)
    group, fate = group.fail(alone=True)
    assert fate == "spared"
    assert group.fail(alone=True)[1] == "again"
    assert group.fail(alone=False) == (group, "fallen")
    assert group.finish().finish().whole
    with pytest.raises(InvariantBroken):
        group.finish().finish().finish()


@pytest.mark.parametrize(("rewards", "equal"), [([1.0, 1.0], True), ([0.0, 1.0], False), ([0.5], True), ([1.0, 1.0 + 1e-12], False)])
def test_only_exactly_equal_rewards_carry_nothing(rewards: list[float], equal: bool) -> None:
    assert all_equal(rewards) == equal


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("downweight", 0.5, None), "expected more than max_staleness = 1"),
        (("downweight", 0.5, 1), "got 1, expected more than max_staleness = 1"),
        (("drop", 1.0, 3), "expected nothing with rule drop"),
        (("downweight", 0.0, 3), "expected more than 0, at most 1"),
    ],
)
def test_rules_that_cannot_be_are_refused(arguments: tuple[str, float, int | None], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Admission(4, 1, 0, *arguments)  # type: ignore[arg-type]
