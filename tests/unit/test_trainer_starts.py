"""Which losses of a trainer are followed by a start in place, and when a run ends instead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import AnomalyFound, AsyncmoeError, ConfigError, Disagreement, InvariantBroken, StorageError
from asyncmoe.launch.trainer_starts import LONGEST_WAIT_S, Allowance, EndRun, StartAgain, StartFailure, decide, in_a_row

GOES_ON = Allowance(max_restarts=2, logged=True, others=True)


def failed(step: int = 0, exit_code: int = 1) -> StartFailure:
    return StartFailure("a rank was ended by SIGKILL", exit_code, step)


def test_a_lost_trainer_starts_again_at_once_and_with_waits_when_it_goes_on_failing() -> None:
    allowance = Allowance(max_restarts=4, logged=True, others=True)
    history = [failed(7)]
    assert decide([], history[0], allowance) == StartAgain(after_s=0.0, row=1)
    waits = []
    for _ in range(3):
        decision = decide(history, failed(7), allowance)
        assert isinstance(decision, StartAgain)
        waits.append(decision.after_s)
        history.append(failed(7))
    assert waits == [5.0, 10.0, 20.0]
    told = "the trainer was lost 5 times without a new step; trainer.max_restarts is 4"
    assert decide(history, failed(7), allowance) == EndRun(told)
    assert decide(history, failed(8), allowance) == StartAgain(after_s=0.0, row=1), "it got on"


def test_steps_that_are_trained_again_are_no_progress() -> None:
    assert in_a_row([]) == 0
    assert in_a_row([failed(9), failed(9), failed(6)]) == 3, "a batch that kills the trainer kills it again"
    assert in_a_row([failed(9), failed(0), failed(10)]) == 1
    assert decide([failed(9), failed(9)], failed(5), GOES_ON) == EndRun(
        "the trainer was lost 3 times without a new step; trainer.max_restarts is 2"
    )


@pytest.mark.parametrize("kind", [ConfigError, StorageError, AnomalyFound, InvariantBroken, Disagreement])
def test_what_would_recur_is_not_tried_again(kind: type[AsyncmoeError]) -> None:
    assert decide([], failed(3, kind.exit_code), GOES_ON) == EndRun()


@pytest.mark.parametrize(
    ("allowance", "why"),
    [
        (Allowance(0, logged=True, others=True), ""),
        (Allowance(2, logged=True, others=False), ""),
        (Allowance(2, logged=True, others=True, stopping=True), ""),
        (Allowance(2, logged=False, others=True), "the trainer does not start again without the log (log.enabled)"),
    ],
)
def test_a_restart_needs_the_rest_of_the_run(allowance: Allowance, why: str) -> None:
    assert decide([], failed(3), allowance) == EndRun(why)


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(0, 4))
def test_a_trainer_that_does_not_get_on_is_started_a_bounded_number_of_times(steps: list[int], most: int) -> None:
    allowance, history, best, stuck = Allowance(most, logged=True, others=True), [], 0, 0
    for step in steps:
        stuck = 0 if step > best else stuck + 1
        decision = decide(history, failed(step), allowance)
        history.append(failed(step))
        if isinstance(decision, EndRun):
            assert in_a_row(history) == most + 1
            return
        assert 0 <= decision.after_s <= LONGEST_WAIT_S
        assert (decision.after_s == 0) == (decision.row == 1)
        assert stuck <= most
        best = max(best, step)
