"""A response that cannot be scored is refused under a reason, never rewarded with zero; and scoring never blocks the loop."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.errors import ConfigError, TrajectoryRejected
from asyncmoe.rollout.scoring import Sample, Score, Scorer, loading, plugin
from tests.unit import scorers

pytestmark = pytest.mark.usefixtures("importable")
SCORERS = "tests.unit.scorers"


def scorer(name: str, timeout_s: float = 20.0, **more: Any) -> Scorer:
    section = ScoringSection(scorer=name, timeout_s=timeout_s, **{"retries": 0, **more})
    return loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: "".join(map(chr, tokens)))


def outcomes(name: str, responses: list[str], timeout_s: float = 20.0, **more: Any) -> list[Score | TrajectoryRejected]:
    """The outcome of each response."""
    return scored(name, [Sample("12+7=", response, "19", (1,), (True,)) for response in responses], timeout_s, **more)


def scored(name: str, samples: list[Sample], timeout_s: float = 20.0, **more: Any) -> list[Score | TrajectoryRejected]:
    """The outcome of each sample, one after the other, with one scorer."""

    async def run() -> list[Score | TrajectoryRejected]:
        made = scorer(name, timeout_s, **more)
        found: list[Score | TrajectoryRejected] = []
        try:
            for sample in samples:
                try:
                    found.append(await made.score(sample))
                except TrajectoryRejected as rejected:
                    found.append(rejected)
        finally:
            await made.close()
        return found

    return asyncio.run(run())


def score_all(name: str, responses: list[str], timeout_s: float = 20.0, **more: Any) -> list[float | str]:
    """Each response's reward, or the reason for which it was rejected."""
    return [one.reward if isinstance(one, Score) else one.reason for one in outcomes(name, responses, timeout_s, **more)]


def test_exact_compares_the_whole_answer() -> None:
    assert score_all("exact", ["19", " 19\n", "19.", "119", ""]) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_users_function_scores_and_may_print() -> None:
    assert score_all(f"{SCORERS}:length", ["ab", "abcde"]) == [0.2, 0.5]


BAD = {
    "raise": "scorer_error",
    "nan": "scorer_nan",
    "infinite": "scorer_nan",
    "text": "scorer_garbage",
    "nothing": "scorer_garbage",
    "array": "scorer_garbage",
    "huge": "scorer_garbage",
    "unknown key": "scorer_garbage",
    "steps of text": "scorer_garbage",
    "another number of steps": "scorer_garbage",
    "step of nan": "scorer_nan",
    "metrics of text": "scorer_garbage",
    "metric without a name": "scorer_garbage",
    "metric with a sentence": "scorer_garbage",
    "metric of no text": "scorer_garbage",
    "no connection": "scorer_unavailable",
    "good": 1.0,
}


@pytest.mark.parametrize("function", ["bad", "bad_coroutine"])
def test_every_way_to_fail_has_a_reason_in_one_short_line(function: str) -> None:
    *found, good = outcomes(f"{SCORERS}:{function}", [*BAD])
    assert [one.reason for one in found] + [good.reward] == [*BAD.values()]
    assert all(len(str(one)) < 300 and "\n" not in str(one) for one in found)


def test_metrics_are_numbers_by_name_beside_the_reward() -> None:
    for function in ("named", "named_coroutine"):
        right, wrong = outcomes(f"{SCORERS}:{function}", ["19", "1"])
        assert (right.reward, right.metrics) == (1.25, {"brief": 0.25, "right": 1.0, "tries": 2.0})
        assert {type(value) for value in right.metrics.values()} == {float}
        assert wrong.metrics["right"] == 0.0
    (by_class,) = outcomes(f"{SCORERS}:NamedByClass", ["abc"])
    assert by_class.metrics == {"length": 3.0}


def test_a_function_that_hangs_or_dies_is_replaced() -> None:
    responses = ["hang", "good", "exit", "good"]
    # Long enough that a loaded machine answers "good" in it.
    assert score_all(f"{SCORERS}:bad", responses, timeout_s=2.0) == ["scorer_timeout", 1.0, "scorer_error", 1.0]


def test_nothing_but_the_function_itself_takes_requests_and_answers() -> None:
    assert score_all(f"{SCORERS}:forks_and_reads", ["a", "b", "c"], timeout_s=5.0) == [0.5] * 3


def test_a_coroutine_that_hangs_is_cancelled() -> None:
    assert score_all(f"{SCORERS}:bad_coroutine", ["hang", "its own timeout"], timeout_s=0.3) == [
        "scorer_timeout",
        "scorer_unavailable",
    ]


def test_a_process_is_kept_when_nobody_waits_for_its_answer_any_more() -> None:
    async def run() -> tuple[float, float]:
        made = scorer(f"{SCORERS}:process", timeout_s=10.0)
        first = await made.score(Sample("", "", ""))
        asking = asyncio.create_task(made.score(Sample("", "slow", "")))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.5)
        second = await made.score(Sample("", "", ""))
        await made.close()
        return first.reward, second.reward

    first, second = asyncio.run(run())
    assert first == second


@pytest.mark.parametrize(
    ("name", "said"),
    [("nonsense", "package.module:function"), (f"{SCORERS}:missing", ""), (f"{SCORERS}:not_a_function", ""), (f"{SCORERS}:NoScore", "")],
)
def test_a_scorer_that_is_not_there_is_a_configuration_error(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scoring\.scorer: .*{said}"):
        scorer(name)


def test_a_function_that_raises_is_asked_again() -> None:
    assert score_all(f"{SCORERS}:second_time", ["a"], retries=1) == [1.0]
    assert score_all(f"{SCORERS}:second_time", ["a"], retries=0) == ["scorer_error"]


def test_an_answer_of_more_than_a_megabyte_is_garbage_and_the_next_is_read_from_its_beginning() -> None:
    assert score_all(f"{SCORERS}:bad", ["flood", "good"]) == ["scorer_garbage", 1.0]
    assert score_all(f"{SCORERS}:bad", ["long complaint", "good"]) == ["scorer_error", 1.0]


WHOLE = Sample("p", "cd", "x", (97, 98, 99, 97, 98), (False, True, True, False, True), "solver")


@pytest.mark.parametrize("name", ["Plain", "Coroutine", "steps_of_function"])
def test_steps_are_scored_at_their_last_tokens(name: str) -> None:
    (score,) = scored(f"{SCORERS}:{name}", [WHOLE], options={} if name == "steps_of_function" else {"first": 0.25})
    assert score.reward == 1.0
    assert score.rewards.dtype == np.float32
    np.testing.assert_array_equal(score.rewards, np.array([np.nan, np.nan, 0.25, np.nan, 0.5], np.float32))


@pytest.mark.parametrize("name", ["Plain", "Coroutine"])
def test_an_object_is_made_once_and_closed(name: str, tmp_path: Path) -> None:
    scored(f"{SCORERS}:{name}", [WHOLE] * 3, options={"first": 0.25, "diary": str(tmp_path / "diary")}, concurrency=1)
    assert (tmp_path / "diary").read_text().split() == ["made", "score", "score", "score", "closed"]


@pytest.mark.parametrize("name", ["Coroutine", "Plain", "length"])
def test_options_that_a_scorer_does_not_take_are_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"scoring\.options: .*colour"):  # a plain class is made in a process of its own
        score_all(f"{SCORERS}:{name}", ["cd"], options={"colour": "red"})


def place(code: str) -> str:
    """The file and line of `tests/unit/scorers.py` that holds `code`."""
    lines, _ = inspect.getsourcelines(scorers)
    return f"tests/unit/scorers.py:{next(number for number, line in enumerate(lines, 1) if code in line)}"


@pytest.mark.parametrize("name", ["bad", "bad_coroutine"])
def test_the_log_has_file_line_and_traceback_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    code = 'raise ValueError("cannot score this")'
    found = outcomes(f"{SCORERS}:{name}", ["raise", "fine", "raise"], retries=1, concurrency=1)
    assert [str(found[n]) for n in (0, 2)] == [f"scorer_error: ValueError: cannot score this ({place(code)})"] * 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the scorer raised at {place(code)}")
    assert "Traceback (most recent call last):" in said
    assert said.endswith("ValueError: cannot score this")


def test_wrong_arguments_are_placed_at_the_scorer() -> None:
    def takes_one(prompt: str) -> float:
        return 1.0

    try:
        takes_one("a", "b")  # type: ignore[call-arg]
    except TypeError as error:
        raised = plugin.raised_by(error.with_traceback(None), takes_one)
    assert raised["at"] == f"tests/unit/test_scoring.py:{takes_one.__code__.co_firstlineno}"
    assert "positional argument" in raised["said"]
