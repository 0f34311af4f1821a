"""Turns with tool calls between them: tool results become observations, tool failures end the episode."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.tool_parsers import SGLANG_PARSERS
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.types import ParsedCall, Sampling, VersionSpan
from asyncmoe.errors import ConfigError, TrajectoryRejected
from asyncmoe.rollout.chat_template import CALL_ID
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Trajectory
from tests.unit import openai_policy
from tests.unit.generations import generation_of

BOUNDS = Bounds(turns=4, tokens=512)


class Scripted:
    """A pool whose engines say one line after the other, each with the end of the sequence."""

    lost_tokens = recomputed_tokens = 0

    def __init__(self, known: Tokenizer, *lines: str) -> None:
        self.lines = [(*known.encode(line), known.eos) for line in lines]

    async def parse_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[ParsedCall]:
        raise AssertionError("no parser of the engine is asked")

    async def generate(self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, **_: object) -> PooledGeneration:
        said = self.lines.pop(0)
        return PooledGeneration(generation_of(said, (-0.5,) * len(said), (VersionSpan("0", 0, len(said)),), "stop", 0), 0)


def play(environment: WithTools, known: Tokenizer, *lines: str, pool: Scripted | None = None, prompt: Prompt | None = None) -> Trajectory:
    async def run() -> Trajectory:
        engines: Any = pool or Scripted(known, *lines)
        stage = RolloutContext(engines, Sampling(1.0, 64, (known.eos,)), known, Exact(), environment, BOUNDS)
        try:
            (made,) = await episode.run(stage, prompt or Prompt("6*7=", known.encode("6*7="), "42"), EpisodeId(0, 0, 0))
        finally:
            await environment.close()
        return made

    return asyncio.run(run())


def parts(made: Trajectory, known: Tokenizer) -> list[tuple[bool, str]]:
    """(sampled, text) of each stretch."""
    found: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(made.tokens.tolist(), made.loss_mask.tolist(), strict=True):
        if not found or found[-1][0] != sampled:
            found.append((sampled, []))
        found[-1][1].append(token)
    return [(sampled, known.decode(tokens)) for sampled, tokens in found]


@pytest.mark.parametrize(
    ("says", "given"),
    [
        ("[1+1] [2+2]", "2\n4\n"),
        ("[1/0]", "error: ZeroDivisionError: division by zero\n"),
        ("[abacus: 1]", "error: no tool named abacus; there are calculator\n"),
    ],
)
def test_tools_answer_between_two_turns(says: str, given: str, known: Tokenizer) -> None:
    made = play(WithTools(("calculator",), "brackets", chat=False), known, says, "42")
    assert parts(made, known) == [(False, "6*7="), (True, says), (False, given), (True, "42")]
    assert made.reward == 1.0


def test_in_a_chat_an_observation_is_a_turn_of_the_template(known: Tokenizer) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    made = play(WithTools(("calculator",)), known, call, "42")
    text = known.decode(made.tokens.tolist())
    # Special tokens leave no text.
    assert text == f"6*7={call}\ntool\n42\nassistant\n42"
    assert len(made.tokens) == made.loss_mask.sum() + len("6*7=") + len(known.between(["42"]))


def shouting(on_failure: Any = "observe", characters: int = 100) -> WithTools:
    options = {"shout_later": {"characters": characters, "timeout_s": 0.05}}
    return WithTools((f"{FUNCTIONS}:shout_later",), "brackets", chat=False, options=options, on_failure=on_failure)


def why_not(environment: WithTools, known: Tokenizer, *lines: str) -> str:
    with pytest.raises(TrajectoryRejected) as refused:
        play(environment, known, *lines)
    return refused.value.reason


@pytest.mark.parametrize(
    ("says", "reason", "given"),
    [
        ("[flood]", "tool_flood", "X" * 100 + "\n[cut at 100 characters]\n"),
        ("[hang]", "tool_timeout", "error: shout_later took longer than 0.05 s\n"),
    ],
)
def test_a_call_that_misbehaves_is_observed_unless_it_is_to_end_the_episode(says: str, reason: str, given: str, known: Tokenizer) -> None:
    environment = shouting()
    made = play(environment, known, says, "42")
    assert parts(made, known) == [(False, "6*7="), (True, says), (False, given), (True, "42")]
    assert made.reward == 1.0
    assert dict(environment.counts["shout_later"].failures) == {reason: 1}
    assert why_not(shouting("reject"), known, says, "42") == reason
    assert why_not(shouting(), known, "[number]", "42") == "tool_crash", "a tool that fails by itself"


@pytest.mark.parametrize(("says", "responses"), [("[a]", BOUNDS.turns), ("[flood]", 1)])
def test_the_last_response_within_the_limits_of_turns_and_tokens_is_scored(says: str, responses: int, known: Tokenizer) -> None:
    made = play(shouting(characters=10**6), known, *[says] * 9, prompt=Prompt("6*7=", known.encode("6*7="), says))
    assert [text for sampled, text in parts(made, known) if sampled] == [says] * responses
    assert parts(made, known)[-1][0], "what was given after it is not trained on"
    assert made.reward == 1.0
    assert why_not(shouting("reject", 10**6), known, *[says] * 9) == "episode_too_long"


FUNCTIONS = "tests.unit.tool_functions"
FLIGHT = f"{FUNCTIONS}:find_flight"
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_the_template_describes_the_tools(known: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain = Prompt("a", known.encode("a"), "")
    asked = ({"role": "user", "content": "a"},)
    chat = Prompt("a", known.encode(known.render(asked)), "", messages=asked)
    with caplog.at_level(logging.WARNING):
        ignoring = WithTools([FLIGHT])
        assert [ignoring.asked(one, known) for one in (chat, chat, plain)] == [chat.tokens, chat.tokens, plain.tokens]
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError) as refused:
        WithTools([FLIGHT], schemas=True).described(known)
    assert refused.value.what == "environment.tools.schemas"
    monkeypatch.setattr(known._tokenizer, "chat_template", TEMPLATE)
    text = known.decode(WithTools([FLIGHT]).asked(chat, known))
    assert '"origin"' in text
    assert text.endswith("a")
    assert WithTools([FLIGHT]).asked(plain, known) == plain.tokens
    assert WithTools([FLIGHT], "qwen3_coder").asked(chat, known) != chat.tokens
    assert WithTools([FLIGHT], schemas=False).asked(chat, known) == WithTools([FLIGHT], "brackets").asked(chat, known) == chat.tokens


class Parsing(Scripted):
    """Its engines' parser finds the calls that a test specifies."""

    def __init__(self, known: Tokenizer, found: Sequence[ParsedCall], *lines: str) -> None:
        super().__init__(known, *lines)
        self.found, self.parsed = found, list[tuple[str, str, str]]()

    async def parse_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[ParsedCall]:
        self.parsed.append((text, parser, str(tools[0]["function"]["name"])))
        return self.found if "call" in text else ()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ('{"origin": "B", "day": 1}', "'B' 2 None economy"),
        ("", "error: origin: "),
        ("{", "error: a call that is not valid JSON"),
        ("[1]", "error: a call is"),
    ],
)
def test_calls_are_read_by_a_parser_of_the_engine(known: Tokenizer, parameters: str, said: str) -> None:
    pool = Parsing(known, [ParsedCall("find_flight", parameters)], "call!<|im_end|>", "42")
    made = play(WithTools([FLIGHT], "qwen3_coder"), known, pool=pool)
    # Special tokens are part of some formats; the token that ended the response is not.
    assert pool.parsed == [(text, "qwen3_coder", "find_flight") for text in ("call!<|im_end|>", "42")]
    assert said in [text for sampled, text in parts(made, known) if not sampled][1]


@pytest.mark.parametrize(("style", "ids"), [("kimi_k2", "functions.{}:{}"), ("kimi_k3", "{}:{}"), ("mistral", CALL_ID)])
def test_the_ids_that_a_policy_writes_come_back_with_the_answers(known: Tokenizer, style: str, ids: str, tmp_path: Path) -> None:
    kimi = openai_policy.tokenizer(tmp_path)
    kimi._tokenizer.chat_template = "{% for m in messages %} {{ m.tool_call_id }} {{ m.content }}<|im_end|>{% endfor %}"
    prompt = Prompt("a", kimi.encode("a "), "42", messages=({"role": "assistant", "content": "b", "tool_calls": [{}, {}]},))
    pool = Parsing(kimi, [ParsedCall("find_flight", "{}"), ParsedCall("no", "{")], "call", "call", "42")
    made = play(WithTools([FLIGHT], style, schemas=False), kimi, pool=pool, prompt=prompt)
    given = " ".join(text for sampled, text in parts(made, kimi) if not sampled)
    assert re.findall(r"(\S+) error", given) == [ids.format(name, at) for at, name in enumerate(("find_flight", "no") * 2, 2)]


def test_the_names_of_sglangs_parsers_are_sglangs() -> None:
    found = sorted(Path(".venv-engine").glob("lib/python3*/site-packages/sglang/srt/function_call/function_call_parser.py"))
    if not found:
        pytest.skip("no SGLang in .venv-engine")
    table = next(
        node.value
        for node in ast.walk(ast.parse(found[0].read_text()))
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "ToolCallParserEnum"
    )
    names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
    left_out = {"hermes", "response_template", "deepseekv4", "deepseekv41", "beam", "glm47", "iquest_q1"}
    assert names - left_out == set(SGLANG_PARSERS)
