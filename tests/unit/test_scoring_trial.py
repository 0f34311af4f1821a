"""Before engines start, the scorer is tried on the first prompt, and reference answers are checked against themselves."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.scoring import loading
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tasks.order import ListedTask
from asyncmoe.rollout.workers import service
from asyncmoe.rollout.workers.service import WorkerService
from asyncmoe.rpc.worker_messages import WorkerBegin
from asyncmoe.trajectory import NOTHING
from tests.configs import minimal
from tests.prompts import jsonl

SCORERS = "tests.unit.scorers"

pytestmark = pytest.mark.usefixtures("importable")


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


def config(run_dir: Path, kind: str = "arithmetic", more: dict[str, Any] | None = None, **section: Any) -> Config:
    task = {"kind": kind, **({"path": "unused.jsonl"} if kind == "jsonl" else {})}
    return minimal(run_dir, task=task, scoring={"concurrency": 1, **section}, **more or {})


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


SCORED = [{"scorer": f"{SCORERS}:slowly"}, {"scorer": "exact"}, {"scorer": f"{SCORERS}:moody", "try_first": False}]


@pytest.mark.parametrize("section", SCORED)
def test_a_scorer_that_scores_lets_engines_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: dict[str, Any]) -> None:
    with pytest.raises(Started):
        serve(monkeypatch, tmp_path, config(tmp_path, **section))


@pytest.mark.parametrize(
    ("scorer", "got"),
    [
        (f"{SCORERS}:moody", r"tests\.unit\.scorers:moody, which raised ValueError: .* \(tests/unit/scorers\.py:\d+\),"),
        ("builtins:print", r"builtins:print, which failed: .* returned NoneType None instead of a number"),
        ("http://127.0.0.1:9/score", r"http://127.0.0.1:9/score, which failed: .*scoring\.try_first=false"),
    ],
)
def test_a_scorer_that_does_not_score_ends_the_run_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, scorer: str, got: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^scoring\.scorer: got {got}"):
        serve(monkeypatch, tmp_path, config(tmp_path, scorer=scorer))
    assert ("in moody" in caplog.text) == (scorer == f"{SCORERS}:moody")


@pytest.mark.parametrize(("weighed", "starts"), [("brief", True), ("breif", False)])
def test_gdpo_weighs_metrics_of_the_scorer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weighed: str, starts: bool) -> None:
    objective = {"advantage": "gdpo", "advantage_options": {"weights": {"right": 1, weighed: 0.5}}}
    with pytest.raises(Started) if starts else pytest.raises(ConfigError, match=rf"^objective\.advantage_options: got .*{weighed}"):
        serve(monkeypatch, tmp_path, config(tmp_path, more={"objective": objective}, scorer=f"{SCORERS}:named"))


def test_exact_without_answers_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unanswered = SimpleNamespace(prompt=lambda group: Prompt("q", (1, 2), ""))
    for try_first in (True, False):
        with pytest.raises(ConfigError, match=r"^scoring\.scorer: got exact, but the first prompt has no answer, expected answers"):
            serve(monkeypatch, tmp_path, config(tmp_path, scorer="exact", try_first=try_first), unanswered)


def test_sets_that_nothing_asks_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Started), caplog.at_level(logging.WARNING):
        serve(monkeypatch, tmp_path, config(tmp_path, more={"evaluation": {"sets": {"a": {"path": "a.jsonl"}}}}, scorer="exact"))
    assert "evaluation.sets: none of them is asked, because evaluation.every is 0" in caplog.text


def questions(path: Path, *answers: str) -> ListedTask:
    path.write_text("".join(json.dumps({"question": "q", "answer": f"so\n#### {answer}"}) + "\n" for answer in answers))
    return jsonl(Characters(), path, chat_template=False, seed=0)  # type: ignore[arg-type]


def test_an_answer_that_does_not_equal_itself_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in (r"\text{}", "(" * 9_000):
        task = questions(tmp_path / "d.jsonl", "18", "(3, 4)", wrong, "$$", "1,234", "no solution")
        with pytest.raises(DataError, match=r"^task\.path: got .*d\.jsonl line 3 ") as error:
            serve(monkeypatch, tmp_path, config(tmp_path, "jsonl"), task)
        assert len(str(error.value)) < 1500
    right = questions(tmp_path / "d.jsonl", "18", "(3, 4)", "1,234", "no solution")
    with pytest.raises(Started):
        serve(monkeypatch, tmp_path, config(tmp_path, "jsonl"), right)
