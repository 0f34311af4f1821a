"""The consequence of losing each process of a run: a restart, a run without it, or the end."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import RECURRING
from asyncmoe.launch.rule import LONGEST_WAIT_S, EndRun, Failure, How, LetGo, LossRule, StartAgain, decide, in_a_row, table
from tests.configs import demo

ENGINES = ("engine.0", "engine.1")


def rules(*settings: str, spare: bool = True) -> dict[str, LossRule]:
    return table(demo(*settings), ENGINES, spare=spare)


def lost(*parts: str, step: int = 0, exit_code: int = 1, how: How = "lost") -> Failure:
    return Failure(dict.fromkeys(parts, how), "a signal", exit_code, step)


def test_a_lost_trainer_starts_again_at_once_and_with_waits_when_it_goes_on_failing() -> None:
    made, history = rules("trainer.max_restarts=4"), [lost("trainer", step=7)]
    assert decide(made, history[0], []) == StartAgain(("trainer",), 0.0, 1, 4)
    waits = []
    for _ in range(3):
        decision = decide(made, lost("trainer", step=7), history)
        waits.append(decision.after_s)
        history.append(lost("trainer", step=7))
    assert waits == [5.0, 10.0, 20.0]
    told = "the trainer was lost 5 times without a new step; trainer.max_restarts is 4"
    assert decide(made, lost("trainer", step=7), history) == EndRun(told)
    assert decide(made, lost("trainer", step=8), history) == StartAgain(("trainer",), 0.0, 1, 4), "it got on"


def test_steps_that_are_trained_again_are_no_progress() -> None:
    assert in_a_row([]) == 0
    assert in_a_row([lost(step=step) for step in (9, 9, 6)]) == 3, "a batch that kills the trainer kills it again"
    assert in_a_row([lost(step=step) for step in (9, 0, 10)]) == 1


@pytest.mark.parametrize(
    ("failure", "parts"),
    [
        (lost("trainer", how="said"), ("trainer",)),
        (lost("trainer", "controller"), ("controller", "trainer")),
        (Failure({"trainer": "said", "controller": "lost"}, ""), ("controller", "trainer")),
        (lost("engine.0", "trainer"), ("trainer",)),
        (lost("engine.0"), ("engine.0",)),
        (lost("engine.1", "engine.0"), ("engine.1",)),
    ],
)
def test_each_loss_starts_its_parts_again(failure: Failure, parts: tuple[str, ...]) -> None:
    assert decide(rules(), failure, []).parts == parts


@pytest.mark.parametrize(
    ("failure", "settings", "why"),
    [
        (lost("controller", how="said"), (), ""),
        (Failure({"controller": "said", "trainer": "lost"}, ""), (), ""),
        (Failure({"engine.0": "said", "trainer": "lost"}, ""), (), ""),
        *((lost("trainer", exit_code=recurs, how="said"), (), "") for recurs in RECURRING),
        (lost("trainer"), ("trainer.max_restarts=0",), ""),
        (lost("controller"), ("run.controller_restarts=0",), ""),
        (lost("controller"), ("engines.orphan_s=0",), "the controller starts again only with sync.method reshard, and .*"),
        (lost(*ENGINES, how="used up"), (), ""),
    ],
)
def test_a_run_ends_with_what_cannot_start_again(failure: Failure, settings: tuple[str, ...], why: str) -> None:
    ended = decide(rules(*settings), failure, [])
    assert ended.why == why or (why.endswith(".*") and ended.why.startswith(why[:-2]))


def test_a_run_goes_on_without_an_engine_that_is_used_up_while_there_is_another() -> None:
    assert decide(rules(), lost("engine.0", how="used up"), []) == LetGo("engine.0")
    assert decide(rules(spare=False), lost("engine.0", how="used up"), []) == EndRun()
    made, failure = rules("engines.restarts=1"), lost("engine.1", step=3)
    assert decide(made, failure, [failure]) == LetGo("engine.1")
    left = {name: loss for name, loss in made.items() if name != "engine.0"}
    assert decide(left, failure, [failure]) == EndRun("engine.1 was lost 2 times without a new step; engines.restarts is 1")
    assert decide(made, lost("engine.1"), [], stopping=True) == LetGo("engine.1")
    assert decide(made, lost("trainer"), [], stopping=True) == EndRun()


HOWS: tuple[How, ...] = ("lost", "used up", "said")
FAILURES = st.dictionaries(st.sampled_from(["controller", "trainer", *ENGINES]), st.sampled_from(HOWS), min_size=1)


@given(st.lists(st.tuples(FAILURES, st.integers(0, 6)), max_size=40), st.integers(0, 3), st.booleans())
def test_every_failure_is_answered_and_restarts_are_bounded(failures: list[tuple[Mapping[str, How], int]], most: int, spare: bool) -> None:
    """Whatever fails, in whatever order: what starts again was lost or is the trainer; a part that does not get on is started a bounded
    number of times; a controller never starts without the trainer, and nothing starts again beside something that said why it ended."""
    made = rules(f"trainer.max_restarts={most}", f"run.controller_restarts={most}", f"engines.restarts={most}", spare=spare)
    history: list[Failure] = []
    for ended, step in failures:
        failure = Failure({name: how for name, how in ended.items() if name in made}, "", 1, step)
        decision = decide(made, failure, history)
        match decision:
            case StartAgain(parts, after_s, row, limit):
                assert 1 <= row <= limit == most
                assert 0 <= after_s <= LONGEST_WAIT_S
                assert (after_s == 0) == (row == 1)
                assert ("trainer" in parts) if "controller" in parts else len(parts) == 1
                assert failure.ended[parts[0]] == "lost" or parts == ("trainer",)
                assert not any(how == "said" and name != "trainer" for name, how in failure.ended.items())
                same = [one for one in history if one.ended.keys() & {parts[0]}]
                best = max((one.step for one in same), default=0)
                assert row == 1 or step <= best
                history.append(failure)
            case LetGo(part):
                assert spare
                assert any(name in made and name != part for name in ENGINES)
                del made[part]
            case EndRun():
                return
