"""Warm-up demonstrations: those that exceed the model's context are replaced, and the environment's rewards are checked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.errors import DataError
from asyncmoe.models.make import make_model
from asyncmoe.rollout import parts
from asyncmoe.rollout.demonstrations import TRIES, Demonstrations
from asyncmoe.rollout.episodes import environments
from asyncmoe.rollout.episodes.environment import Agent, Bounds, Episode
from asyncmoe.rollout.episodes.episode import Teaching
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Demonstration, Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Trajectory
from tests.configs import minimal

ROWS, TOTAL, MOST = 5, 8, 30


class Rows:
    """A file whose question n is row n % `ROWS`; the rows of `long` have more tokens than `MOST`."""

    def __init__(self, long: Sequence[int]) -> None:
        self.long = long

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        row = group % ROWS
        return Prompt(str(row), (row,) * (MOST if row in self.long else 2), "", where=f"rows.jsonl line {row + 1}")

    def demonstration(self, index: int) -> Demonstration:
        prompt = self.prompt(index, "demonstration")
        return Demonstration(prompt.tokens, (1,), prompt.where)


class Answers:
    """An environment with a teacher, which returns `rewards`."""

    def __init__(self, rewards: float | Mapping[str, float] | None = 1.0, failing: str = "") -> None:
        self.rewards, self.failing = rewards, failing

    async def run(self, episode: Episode) -> float | Mapping[str, float] | None:
        if episode.prompt.text == self.failing:
            raise ConnectionError("a tool's server was away")
        agent = episode.agent()
        agent.see(episode.prompt.tokens)
        await agent.respond()
        return self.rewards

    def demonstrate(self, agent: Agent, episode: Episode) -> str:
        return "1"


def teaching(known: Tokenizer, environment: Answers) -> Teaching:
    return Teaching(environment, known, Bounds(), seed=0)


@pytest.mark.parametrize("taught", [False, True])
def test_one_that_the_context_does_not_hold_is_replaced(taught: bool, known: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    def made(first: int) -> list[Sequence[Trajectory]]:
        demonstrations = Demonstrations(Rows([1, 4]), teaching(known, Answers()) if taught else None, TOTAL, MOST)
        return [asyncio.run(demonstrations(index)) for index in range(first, TOTAL)]

    with caplog.at_level(logging.WARNING):
        found = made(0)
    # 1 and 6 ask row 1, and 4 asks row 4, which later questions of another row replace: 9 and 17; 14 and 22; 12.
    assert [int(one.tokens[0]) for (one,) in found] == [0, 2, 2, 3, 2, 0, 2, 2]
    assert [one.key for (one,) in found] == [f"d{index}.a0" for index in range(TOTAL)]
    assert max(len(one.tokens) for (one,) in found) <= MOST
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == ["rows.jsonl line 2", "rows.jsonl line 5"], "once a row"
    assert f"{MOST + (2 if taught else 1)} tokens, more than the {MOST} that" in said[0]
    resumed = made(4)
    assert [one.tokens.tolist() for (one,) in resumed] == [one.tokens.tolist() for (one,) in found[4:]]


def test_a_warm_up_of_long_rows_only_ends_with_the_way_out() -> None:
    demonstrations = Demonstrations(Rows(range(ROWS)), None, TOTAL, MOST)
    with pytest.raises(DataError, match=rf"demonstration 3 .*got {TRIES} questions .*rows\.jsonl line .* task\.filter"):
        asyncio.run(demonstrations(3))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [("1", "bad_reward"), ({"polcy": 1.0}, "environment_error"), ({}, "environment_error"), (float("nan"), "bad_reward")],
)
def test_a_wrong_return_value_is_told(rewards: float | Mapping[str, float], expected: str, known: Tokenizer) -> None:
    demonstrations = Demonstrations(Rows([]), teaching(known, Answers(rewards)), TOTAL, MOST)
    with pytest.raises(DataError, match=expected):
        asyncio.run(demonstrations(0))


@pytest.mark.parametrize("kind", ["single_turn", f"{__name__}:Answers"])
def test_a_run_replaces_what_its_own_bounds_do_not_hold(kind: str, known: Tokenizer, tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", MadeModel(), seed=0)
    environment = {"kind": kind, "max_tokens": MOST}
    config = minimal(tmp_path, tmp_path / "tiny", 9, environment=environment, warmup={"steps": 2, "batch": 4})
    loaded = parts.RolloutParts(known, Rows([1]), (), Exact(), environments.load(config))
    (made,) = asyncio.run(parts.demonstrations_of(config, loaded)(1))
    assert (made.key, made.tokens[0]) == ("d1.a0", 4)
