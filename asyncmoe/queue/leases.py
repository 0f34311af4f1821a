"""The leases of all steps: asked for, decided, committed. Pure.

A step is asked for when the first rank names its terms, and decided once: with a batch (a grant), or with `stop`. Every rank that asks gets
this answer until the step is committed. A committed step is never leased again, unless the trainer returns to an earlier step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from asyncmoe.errors import ConfigError, ProtocolError
from asyncmoe.rpc.messages import Leased, Phase

T = TypeVar("T")


@dataclass(frozen=True)
class LeaseTerms:
    """The terms on which all ranks must agree when they ask for a step: the lane, the number of episodes, and the trainer's version."""

    phase: Phase
    count: int
    version: int


@dataclass(frozen=True)
class Leases:
    """The undecided, granted and committed steps. Immutable: transitions return new leases.

    Attributes:
        trained_steps: optimizer steps taken before the queue was created, plus steps committed since.
        last_commit: newest committed step; -1: none.
        asked: terms by step, for uncommitted steps.
        answers: answers to these steps, once decided.
    """

    trained_steps: int = 0
    last_commit: int = -1
    asked: Mapping[int, LeaseTerms] = field(default_factory=dict)
    answers: Mapping[int, Leased] = field(default_factory=dict)

    @property
    def granted(self) -> tuple[int, ...]:
        """Steps that have a batch, in the order of their grants."""
        return tuple(step for step, answer in self.answers.items() if not answer.stop)

    def phase(self, step: int) -> Phase:
        """Return the lane of a granted step. Raises ProtocolError if `step` has no lease."""
        if step not in self.granted:
            raise ProtocolError(f"step {step} holds no lease")
        return self.asked[step].phase

    def ask(self, step: int, terms: LeaseTerms, capacity: int) -> Leases:
        """Record that a rank asks for a step.

        Args:
            capacity: capacity of the lane in episodes.

        Raises:
            ProtocolError: the step was already committed, ranks disagree, or uncommitted steps have leased too many episodes.
            ConfigError: the count exceeds the capacity.
        """
        if step <= self.last_commit:
            raise ProtocolError(f"lease of step {step}: it has been trained already; the newest trained step is {self.last_commit}")
        if self.asked.get(step, terms) != terms:
            raise ProtocolError(f"lease of step {step}: ranks disagree, {terms} after {self.asked[step]}")
        if terms.count > capacity:
            raise ConfigError(f"{terms.phase} lease", got=terms.count, expected=f"at most the queue's capacity, {capacity} trajectories")
        holders = tuple(one for one in self.granted if self.asked[one].phase == terms.phase)
        leased = sum(self.asked[one].count for one in holders)
        if step not in self.answers and leased + terms.count > capacity:
            raise ProtocolError(f"lease of step {step}: {leased} of {capacity} are leased to steps {holders}; commit those first")
        return replace(self, asked={**self.asked, step: terms})

    def answer_to(self, step: int, terms: LeaseTerms) -> Leased | None:
        """Return the answer, or None if it is undecided. Raises ProtocolError if the step was committed, or its trainer lost, meanwhile."""
        if step not in self.answers and self.asked.get(step) != terms:
            raise ProtocolError(f"lease of step {step}: it was committed, or its trainer lost, during the request")
        return self.answers.get(step)

    def decide(self, step: int, answer: Leased) -> Leases:
        """Record the answer to a step that was asked for."""
        return replace(self, answers={**self.answers, step: answer})

    def commit(self, step: int) -> Leases:
        """End the lease of a trained step. Raises ProtocolError if it has no lease, or an earlier step has one."""
        self.phase(step)
        if (first := min(self.granted)) < step:
            raise ProtocolError(f"commit: got step {step}, expected step {first} first")
        asked, answers = _without(self.asked, step), _without(self.answers, step)
        return replace(self, asked=asked, answers=answers, trained_steps=self.trained_steps + 1, last_commit=step)

    def undecided_forgotten(self) -> Leases:
        """Return the leases without the undecided steps; requests waiting for those are refused (`answer_to`)."""
        return replace(self, asked={step: terms for step, terms in self.asked.items() if step in self.answers})

    def reopen(self, step: int) -> Leases:
        """Return the leases for a trainer that returns to `step`: it may ask for `step` and later steps, and none of them is decided."""
        return Leases(step, min(self.last_commit, step - 1))


def _without(steps: Mapping[int, T], step: int) -> Mapping[int, T]:
    return {one: value for one, value in steps.items() if one != step}
