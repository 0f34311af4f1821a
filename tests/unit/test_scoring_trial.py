"""Before engines start: the scorer is tried on the first prompt, and reference answers are checked against themselves."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe.config import Config, parse
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.scoring import loading, trial
from asyncmoe.rollout.tasks import Example, Prompt
from asyncmoe.rollout.tasks.order import ListedTask
from asyncmoe.rollout.workers import service
from asyncmoe.rollout.workers.service import WorkerService
from asyncmoe.rpc.worker_messages import WorkerBegin
from asyncmoe.trajectory import NOTHING
from tests.prompts import jsonl


class Characters:
    """A tokenizer with a token for each character."""

    eos = 0

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, tokens: tuple[int, ...]) -> str:
        return "".join(map(chr, tokens))


class Sums:
    """A task without golds."""

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        return Prompt("12+7=", (1, 2), "19")


class Started(Exception):
    """An engine would start now."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(Path(__file__).parents[2])


def config(run_dir: Path, kind: str = "arithmetic", more: dict[str, Any] | None = None, **section: Any) -> Config:
    task = {"kind": kind, **({"path": "unused.jsonl"} if kind == "jsonl" else {})}
    values = {"run": {"dir": str(run_dir), "steps": 1}, "model": {"path": "unused"}, "task": task, "scoring": {"concurrency": 1, **section}}
    return parse(values | (more or {}))


def serve(monkeypatch: pytest.MonkeyPatch, run_dir: Path, made: Config, task: Any = None) -> None:
    """Have the first worker of a run begin. Raise `Started` if it comes so far that engines may start."""

    def start(*_: object, **__: object) -> None:
        raise Started

    async def run() -> None:
        scorer = loading.load(made.scoring, made.task, Characters().decode)
        asked = task or Sums()
        loaded = RolloutParts(Characters(), asked, (), scorer, SimpleNamespace())  # type: ignore[arg-type]
        try:
            await WorkerService(made, 1, loaded, NOTHING).answer(WorkerBegin("run", first=True))
        finally:
            await loaded.close()

    monkeypatch.setattr(service.WorkerLog, "open", start)
    run_dir.mkdir(exist_ok=True)
    asyncio.run(run())


def test_a_scorer_that_scores_lets_engines_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Started):
        serve(monkeypatch, tmp_path, config(tmp_path, scorer="tests.unit.scorers:slowly"))
    with pytest.raises(Started):
        serve(monkeypatch, tmp_path, config(tmp_path, scorer="exact"))


def test_a_scorer_that_raises_ends_the_run_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = (
        r"^scoring\.scorer: got tests\.unit\.scorers:moody, which raised ValueError: odd answers are not scored "
        r"\(tests/unit/scorers\.py:\d+\), expected a score of the first prompt's own answer; "
        r"its traceback is in logs/rollout-1\.log"
    )
    with pytest.raises(ConfigError, match=wanted):
        serve(monkeypatch, tmp_path, config(tmp_path, scorer="tests.unit.scorers:moody"))
    assert "in moody" in caplog.text
    with pytest.raises(Started):
        serve(monkeypatch, tmp_path, config(tmp_path, scorer="tests.unit.scorers:moody", try_first=False))


def test_exact_without_answers_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unanswered = SimpleNamespace(prompt=lambda group: Prompt("q", (1, 2), ""))
    for try_first in (True, False):
        with pytest.raises(ConfigError, match=r"^scoring\.scorer: got exact, and the first prompt has no answer, expected answers"):
            serve(monkeypatch, tmp_path, config(tmp_path, scorer="exact", try_first=try_first), unanswered)


def test_evaluation_sets_that_nothing_asks_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Started), caplog.at_level(logging.WARNING):
        serve(monkeypatch, tmp_path, config(tmp_path, more={"evaluation": {"sets": {"a": {"path": "a.jsonl"}}}}, scorer="exact"))
    assert "evaluation.sets: none of them is asked, because evaluation.every is 0" in caplog.text


def test_an_answer_that_is_no_score_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^scoring\.scorer: got builtins:print, which failed: .*expected a score of the first prompt's"):
        serve(monkeypatch, tmp_path, config(tmp_path, scorer="builtins:print"))
    with pytest.raises(ConfigError, match=r"returned NoneType None instead of a number, expected a score"):
        serve(monkeypatch, tmp_path, config(tmp_path, scorer="builtins:print"))


def test_an_endpoint_that_is_not_there_names_the_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"start it first, or set scoring\.try_first=false if it is ready only later$"):
        serve(monkeypatch, tmp_path, config(tmp_path, scorer="http://127.0.0.1:9/score"))


def questions(path: Path, *answers: str) -> ListedTask:
    path.write_text("".join(json.dumps({"question": "q", "answer": f"so\n#### {answer}"}) + "\n" for answer in answers))
    return jsonl(Characters(), path, chat_template=False, seed=0)  # type: ignore[arg-type]


def test_answers_that_do_not_equal_themselves_are_named_with_their_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = questions(tmp_path / "d.jsonl", "18", r"\text{}", "(3, 4)", "$$", r"\text{}", "1,234", "no solution")
    with pytest.raises(DataError) as error:
        serve(monkeypatch, tmp_path, config(tmp_path, "jsonl"), task)
    said = str(error.value)
    assert said.startswith("task.path: got unusable answers: ")
    assert f"{tmp_path / 'd.jsonl'} line 2 '\\\\text{{}}' (the reference" in said
    assert f"{tmp_path / 'd.jsonl'} line 4 '$$' (" in said
    assert said.endswith(
        "expected answers that equal themselves by math_verify; correct all lines with them, or name another scoring.scorer"
    )
    assert "\n" not in said


def test_many_wrong_answers_and_long_ones_stay_one_short_line() -> None:
    golds = [Example("q", "(" * (9_000 + number), where=f"a line {number}") for number in range(100)]
    with pytest.raises(UserError, match="and 95 more") as error:
        asyncio.run(trial.check_golds(golds, "task.path"))
    assert len(str(error.value)) < 1500
