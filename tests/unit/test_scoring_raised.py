"""What a user's scorer raises: file, line and traceback in the log, from a worker process and from the event loop alike."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring import Sample, loading
from asyncmoe.rollout.scoring.raised import raised_by
from tests.unit import scorers


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(Path(__file__).parents[2])


def place(code: str) -> str:
    """The file and line of `tests/unit/scorers.py` that holds `code`."""
    lines, _ = inspect.getsourcelines(scorers)
    return f"tests/unit/scorers.py:{next(number for number, line in enumerate(lines, 1) if code in line)}"


def scored(name: str, responses: Sequence[str], retries: int = 0) -> list[str]:
    """The rejections of `responses`."""

    async def run() -> list[str]:
        section = ScoringSection(scorer=f"tests.unit.scorers:{name}", retries=retries, concurrency=1)
        made = loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: "")
        found = []
        for response in responses:
            try:
                await made.score(Sample("12+7=", response, "19", (1,), (True,)))
            except TrajectoryRejected as rejected:
                found.append(str(rejected))
        await made.close()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["bad", "bad_coroutine"])
def test_the_log_has_file_line_and_traceback_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    code = 'raise ValueError("cannot score this")'
    found = scored(name, ["raise", "fine", "raise"], retries=1)
    assert found == [f"scorer_error: ValueError: cannot score this ({place(code)})"] * 2
    ((said),) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the scorer raised at {place(code)}, which is said once:\nTraceback (most recent call last):\n")
    assert code in said
    assert said.endswith("ValueError: cannot score this")


def test_wrong_arguments_are_placed_at_the_scorer() -> None:
    def scorer(prompt: str) -> float:
        return 1.0

    try:
        scorer("a", "b")  # type: ignore[call-arg]
    except TypeError as error:
        raised = raised_by(error.with_traceback(None), scorer)
    assert raised.at == f"tests/unit/test_scoring_raised.py:{scorer.__code__.co_firstlineno}"
    assert "positional argument" in raised.said
