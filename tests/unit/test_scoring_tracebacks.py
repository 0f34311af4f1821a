"""What a user's scorer raises: file, line and traceback in one bounded log, from a worker process and from the event loop alike."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.errors import StorageError, TrajectoryRejected
from asyncmoe.rollout.scoring import Sample, loading
from asyncmoe.rollout.scoring.stages import write_log
from asyncmoe.rollout.scoring.tracebacks import LOG, Raised, Tracebacks, raised_by
from tests.unit import scorers


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(Path(__file__).parents[2])


def place(code: str) -> str:
    """The file and line of `tests/unit/scorers.py` that holds `code`."""
    lines, _ = inspect.getsourcelines(scorers)
    return f"tests/unit/scorers.py:{next(number for number, line in enumerate(lines, 1) if code in line)}"


def logged(name: str, responses: Sequence[str], run_dir: Path, retries: int = 0) -> tuple[list[str], str]:
    """The rejections of `responses`, and the log."""

    async def run() -> list[str]:
        section = ScoringSection(scorer=f"tests.unit.scorers:{name}", retries=retries, backoff_s=0.0, concurrency=1)
        made = loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: "")
        found = []
        for response in responses:
            try:
                await made.score(Sample("12+7=", response, "19", (1,), (True,)))
            except TrajectoryRejected as rejected:
                found.append(str(rejected))
        await made.close()
        write_log(made, run_dir)
        return found

    found = asyncio.run(run())
    log = run_dir / LOG
    return found, log.read_text() if log.exists() else ""


@pytest.mark.parametrize("name", ["bad", "bad_coroutine"])
def test_the_log_has_file_line_traceback_and_count(name: str, tmp_path: Path) -> None:
    code = 'raise ValueError("cannot score this")'
    found, log = logged(name, ["raise", "fine", "no connection", "raise"], tmp_path, retries=1)
    assert found[0] == found[2] == f"scorer_error: ValueError: cannot score this ({place(code)})"
    assert found[1].endswith(f"the judge is not there ({place('raise ConnectionRefusedError')})")
    first, second = log.split("\n\n")
    assert first.startswith("4 times since ")
    assert f", at {place(code)}\nTraceback of ValueError (most recent call last):\n" in first
    assert code in first
    assert first.endswith("ValueError: cannot score this")
    assert second.startswith("2 times since ")
    assert "asyncmoe/rollout" not in log


def test_a_message_of_any_length_is_cut(tmp_path: Path) -> None:
    found, log = logged("bad", ["long complaint"], tmp_path)
    assert len(found[0]) < 1000
    assert len(log) < 2000


def test_without_an_exception_there_is_no_log(tmp_path: Path) -> None:
    assert logged("length", ["a"], tmp_path) == ([], "")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_placed_at_the_scorer() -> None:
    def scorer(prompt: str) -> float:
        return 1.0

    try:
        scorer("a", "b")  # type: ignore[call-arg]
    except TypeError as error:
        raised = raised_by(error.with_traceback(None), scorer)
    assert raised.at == f"tests/unit/test_scoring_tracebacks.py:{scorer.__code__.co_firstlineno}"
    assert "positional argument" in raised.said


def test_a_deep_recursion_and_a_chain_of_causes_stay_short() -> None:
    def deep(depth: int) -> None:
        try:
            deep(depth + 1)
        except RecursionError as error:
            raise ValueError("again") from error

    try:
        deep(0)
    except (ValueError, RecursionError) as error:
        raised = raised_by(error, deep)
    assert len(raised.trace) <= 8000
    assert "caused by" in raised.trace


def test_a_thousand_places_are_bounded_and_all_counted(tmp_path: Path) -> None:
    kept = Tracebacks()
    for number in range(1000):
        kept.note(Raised(f"a.py:{number}", "E: \udc80 ☃", f"trace {number} " + "x" * 7000 + "\n"))
    kept.write(tmp_path)
    log = (tmp_path / LOG).read_text()
    assert (tmp_path / LOG).stat().st_size < 300_000
    assert log.endswith("968 times elsewhere\n")
    assert kept.count == 1000


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    kept = Tracebacks()
    kept.note(Raised("a.py:1", "E: no", "trace\n"))
    with pytest.raises(StorageError, match=r"scoring\.log"):
        kept.write(tmp_path)
