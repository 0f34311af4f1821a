"""Turns with tool calls between them: what tools say is given, what they break ends the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.types import Generation, ParsedCall, Sampling, VersionSpan
from asyncmoe.errors import ConfigError, TrajectoryRejected
from asyncmoe.models.make import make_model
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Trajectory

BOUNDS = Bounds(turns=4, tokens=512)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tools") / "tiny"
    make_model(path, MadeModel(), seed=0)
    return Tokenizer(path)


class Scripted:
    """A pool whose engines say one line after the other, each with the end of the sequence."""

    lost_tokens = recomputed_tokens = 0

    def __init__(self, tokenizer: Tokenizer, *lines: str) -> None:
        self.lines = [(*tokenizer.encode(line), tokenizer.eos) for line in lines]

    async def parse_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[ParsedCall]:
        raise AssertionError("no parser of the engine is asked")

    async def generate(self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, **_: object) -> PooledGeneration:
        said = self.lines.pop(0)
        return PooledGeneration(Generation.of(said, (-0.5,) * len(said), (VersionSpan("0", 0, len(said)),), "stop", 0), 0)


async def blurts(argument: str) -> str:
    return "x" * 1_000_000


async def sleeps(argument: str) -> str:
    await asyncio.sleep(60)
    return "late"


def play(
    environment: WithTools, tokenizer: Tokenizer, *lines: str, pool: Scripted | None = None, prompt: Prompt | None = None
) -> Trajectory:
    async def run() -> Trajectory:
        engines: Any = pool or Scripted(tokenizer, *lines)
        stage = RolloutContext(engines, Sampling(1.0, 64, (tokenizer.eos,)), tokenizer, Exact(), environment, BOUNDS)
        try:
            (made,) = await episode.run(stage, prompt or Prompt("6*7=", tokenizer.encode("6*7="), "42"), EpisodeId(0, 0, 0))
        finally:
            await environment.close()
        return made

    return asyncio.run(run())


def parts(made: Trajectory, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """(sampled, text) of each stretch."""
    found: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(made.tokens.tolist(), made.loss_mask.tolist(), strict=True):
        if not found or found[-1][0] != sampled:
            found.append((sampled, []))
        found[-1][1].append(token)
    return [(sampled, tokenizer.decode(tokens)) for sampled, tokens in found]


def test_a_tool_answers_between_two_turns(tokenizer: Tokenizer) -> None:
    made = play(WithTools(("calculator",), "brackets", chat=False), tokenizer, "[6*7]", "42")
    assert parts(made, tokenizer) == [(False, "6*7="), (True, "[6*7]"), (False, "42\n"), (True, "42")]
    assert made.reward == 1.0


def test_calls_of_one_response_are_answered_in_their_order(tokenizer: Tokenizer) -> None:
    made = play(WithTools(("calculator",), "brackets", chat=False), tokenizer, "[1+1] [2+2]", "42")
    assert parts(made, tokenizer)[2] == (False, "2\n4\n")


def test_an_ordinary_mistake_is_an_observation(tokenizer: Tokenizer) -> None:
    made = play(WithTools(("calculator",), "brackets", chat=False), tokenizer, "[1/0]", "42")
    assert "error" in parts(made, tokenizer)[2][1]
    assert made.reward == 1.0


def test_an_unknown_tool_is_an_observation_that_names_those_there_are(tokenizer: Tokenizer) -> None:
    made = play(WithTools(("calculator",), "brackets", chat=False), tokenizer, "[abacus: 1]", "42")
    assert parts(made, tokenizer)[2] == (False, "error: no tool named abacus; there are calculator\n")


def test_in_a_chat_an_observation_is_a_turn_of_the_template(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    made = play(WithTools(("calculator",)), tokenizer, call, "42")
    text = tokenizer.decode(made.tokens.tolist())
    # Special tokens leave no text.
    assert text == f"6*7={call}\ntool\n42\nassistant\n42"
    assert len(made.tokens) == made.loss_mask.sum() + len("6*7=") + len(tokenizer.between(["42"]))


@pytest.mark.parametrize(
    ("tool", "options", "reason"),
    [
        ("blurts", {"characters": 100}, "tool_flood"),
        ("sleeps", {"timeout_s": 0.05}, "tool_timeout"),
    ],
)
def test_a_tool_that_misbehaves_ends_the_episode(tool: str, options: dict[str, float], reason: str, tokenizer: Tokenizer) -> None:
    name = f"{__name__}:{tool}"
    with pytest.raises(TrajectoryRejected) as refused:
        play(WithTools((name,), "brackets", chat=False, options={name.rpartition(":")[2]: options}), tokenizer, "[6*7]", "42")
    assert refused.value.reason == reason


def test_a_policy_that_never_stops_calling_is_stopped(tokenizer: Tokenizer) -> None:
    with pytest.raises(TrajectoryRejected) as refused:
        play(WithTools(("calculator",), "brackets", chat=False), tokenizer, *["[1+1]"] * (BOUNDS.turns + 1))
    assert refused.value.reason == "episode_too_long"


@pytest.mark.parametrize(
    ("sandbox", "match"),
    [
        ({"imag": "i"}, r"^environment\.sandbox\.imag: got an unknown key"),
        ({"url": "ftp://x"}, r"^environment\.sandbox\.url: got"),
    ],
)
def test_a_wrong_sandbox_from_a_users_own_class_is_refused_in_one_line(sandbox: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        WithTools(["calculator"], sandbox=sandbox)
    assert "\n" not in str(refused.value)
