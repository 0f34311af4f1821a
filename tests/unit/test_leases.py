"""The leases alone, against what was granted and committed, on random requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncmoe.errors import ConfigError, InvariantBroken, ProtocolError
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Ledger
from asyncmoe.queue.leases import Leases, LeaseTerms
from asyncmoe.rpc.messages import Leased
from tests.unit.example_counts import examples

CAPACITY = 8
steps = st.integers(0, 4)
terms = st.builds(LeaseTerms, st.sampled_from(["rl", "warmup"]), st.integers(1, CAPACITY + 2), st.integers(0, 2))


class LeasesMachine(RuleBasedStateMachine):
    """Leases against a list of what was asked for, granted and committed; a transition that must fail changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.asked: dict[int, LeaseTerms] = {}
        self.held: dict[int, Leased] = {}
        self.stopped: set[int] = set()
        self.last, self.trained = -1, 0

    def _room(self, phase: str) -> int:
        return CAPACITY - sum(self.asked[step].count for step in self.held if self.asked[step].phase == phase)

    def _take(self, transition: Callable[[], Leases], allowed: bool) -> None:
        if allowed:
            self.leases = transition()
        else:
            with pytest.raises((ProtocolError, ConfigError)):
                transition()

    @rule(step=steps, wanted=terms)
    def ask(self, step: int, wanted: LeaseTerms) -> None:
        decided = step in self.held or step in self.stopped
        fits = wanted.count <= (CAPACITY if decided else self._room(wanted.phase))
        allowed = step > self.last and self.asked.get(step, wanted) == wanted and fits
        self._take(lambda: self.leases.ask(step, wanted, CAPACITY), allowed)
        if allowed:
            self.asked[step] = wanted

    @rule(step=steps, stop=st.booleans())
    def decide(self, step: int, stop: bool) -> None:
        if step not in self.asked or step in self.held or step in self.stopped:
            return
        answer = Leased(step, (), self.trained, {}, stop)
        if stop:
            self.stopped.add(step)
        elif self.asked[step].count <= self._room(self.asked[step].phase):  # the buffer grants nothing else
            self.held[step] = answer
        else:
            return
        self.leases = self.leases.decide(step, answer)

    @rule(step=steps)
    def commit(self, step: int) -> None:
        allowed = step in self.held and step == min(self.held)
        self._take(lambda: self.leases.commit(step), allowed)
        if allowed:
            self.last, self.trained = step, self.trained + 1
            del self.held[step], self.asked[step]

    @invariant()
    def agrees(self) -> None:
        assert (self.leases.last_commit, self.leases.trained_steps) == (self.last, self.trained)
        assert (set(self.leases.granted), self.leases.asked) == (set(self.held), self.asked)
        for step, answer in self.held.items():
            assert self.leases.answer_to(step, self.asked[step]) is answer
            assert self.leases.phase(step) == self.asked[step].phase


TestLeasesMachine = LeasesMachine.TestCase
TestLeasesMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_a_rank_learns_that_its_step_ended_while_it_asked() -> None:
    one = LeaseTerms("rl", 4, 1)
    leases = Leases().ask(0, one, 4)
    assert leases.answer_to(0, one) is None
    granted = leases.decide(0, Leased(0, (), 0, {}))
    with pytest.raises(ProtocolError, match="during the request"):
        granted.commit(0).answer_to(0, one)


def test_reasons_add_up_to_the_ledger() -> None:
    accounts = Accounts(Ledger()).start(4, 2).reject(1, 1, "score").discard(1, "equal").discard_spare(1, "spare").reject(1, 0, "score")
    assert (accounts.rejected, accounts.dropped) == ({"score": 3}, {"equal": 1, "spare": 1})
    with pytest.raises(InvariantBroken, match="do not add up"):
        Accounts(accounts.ledger, dropped=accounts.dropped)
