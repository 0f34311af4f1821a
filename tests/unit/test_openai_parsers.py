"""Tool calls of model families become calls of the three APIs, and what the policy sampled is never tokenised again.

data/tool_calls.json has texts in each family's documented format, and what SGLang's own parser classes make of them (`parse_non_stream` of
sglang 0.5.23); tests/engine/test_openai.py asks a real engine for the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from asyncmoe.engines.types import ParsedCall, Sampling
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes.environment import Bounds, Episode
from asyncmoe.rollout.episodes.openai_endpoint.session import Session
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit import openai_policy
from tests.unit.openai_policy import IM_END, SAMPLING, Policy
from tests.unit.openai_served import MESSAGES, post, served

KEPT = json.loads((Path(__file__).parent / "data" / "tool_calls.json").read_text(encoding="utf-8"))
TOOLS, CASES = KEPT["tools"], KEPT["cases"]
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANTHROPICS = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
RESULT = "\n<|im_start|>tool\n{}<|im_end|>\n"


@dataclass
class Parsing(Policy):
    """Its engine's parser finds what SGLang's does.

    Attributes:
        read: (text, parser, tools) of every response that was read.
    """

    read: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = field(default_factory=list)

    async def parse(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[ParsedCall]:
        self.read.append((text, parser, tools))
        (found,) = [case for case in CASES if (case["parser"], case["said"]) == (parser, text)]
        return [ParsedCall(call["name"], call["parameters"], found["rest"]) for call in found["calls"]]

    def episode(self, known: Tokenizer, bounds: Bounds | None = None, sampling: Sampling = SAMPLING) -> Episode:
        made = super().episode(known, bounds, replace(sampling, max_new_tokens=1000))
        made.parse = self.parse
        return made


def says(known: Tokenizer, said: str) -> Parsing:
    return Parsing(openai_policy.text(known, said))


def ids(style: str, calls: Sequence[str], before: int = 0) -> list[str]:
    """A pattern for the id of each call."""
    kimi = [rf"functions\.{name}:{number}" for number, name in enumerate(calls, before)]
    return kimi if style == "kimi_k2" else [r"[0-9a-f]{9}" if style == "mistral" else r"call_[0-9a-f]{24}"] * len(calls)


@pytest.mark.parametrize("case", CASES, ids=[f"{case['parser']}-{number}" for number, case in enumerate(CASES)])
def test_calls_of_each_family_reach_clients_of_each_api_and_are_never_tokenised_again(known: Tokenizer, case: dict[str, Any]) -> None:
    """Each API asks, sends the results of the calls back as its client would, and gets another response: one path a conversation."""
    style, policy = case["parser"], says(known, case["said"])
    expected = [(call["name"], json.loads(call["parameters"])) for call in case["calls"]]
    names, text = [name for name, _ in expected], case["rest"].rstrip() if expected else case["said"]

    async def chat(client: openai.AsyncOpenAI) -> None:
        asked: list[Any] = [*MESSAGES]
        for number in range(2):
            told = (await client.chat.completions.create(model="policy", messages=asked, tools=TOOLS)).choices[0]
            calls: list[Any] = told.message.tool_calls or []
            assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == expected
            assert (told.message.content or "", told.finish_reason) == (text, "tool_calls" if calls else "stop")
            patterns = ids(style, names, number * len(calls))
            assert all(re.fullmatch(pattern, call.id) for pattern, call in zip(patterns, calls, strict=True))
            for call in calls:  # JavaScript writes 2.0 as 2, and orders and spaces otherwise.
                call.function.arguments = json.dumps(json.loads(call.function.arguments), indent=1, sort_keys=True)
            results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls] or [{"role": "user", "content": "3"}]
            asked += [told.message, *results]

    async def responses(client: openai.AsyncOpenAI) -> None:
        asked: list[Any] = [{"role": "user", "content": "b"}]
        for _ in range(2):
            told = await client.responses.create(model="policy", input=asked, tools=FUNCTIONS)  # type: ignore[arg-type]
            calls = [item for item in told.output if item.type == "function_call"]
            assert [(call.name, json.loads(call.arguments)) for call in calls] == expected
            assert told.output_text == text
            results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
            asked += [*told.output, *(results or [{"role": "user", "content": "3"}])]

    async def messages(url: str, session: Session) -> None:
        asked: list[Any] = [{"role": "user", "content": "c"}]
        for _ in range(2):
            body = json.dumps({"model": "policy", "max_tokens": 1000, "messages": asked, "tools": ANTHROPICS}).encode()
            async with post(url, session, body, path="messages") as reply:
                told = await reply.json()
            used = [block for block in told["content"] if block["type"] == "tool_use"]
            assert [(block["name"], block["input"]) for block in used] == expected
            assert "".join(block.get("text", "") for block in told["content"]) == text
            results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "3"} for block in used]
            asked += [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": results or "3"}]

    async def client(url: str, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as openais:
            await chat(openais)
            await responses(openais)
        await messages(url, session)

    episode = served(policy, known, client, style=style)
    first, more = policy.asked[0][1], policy.asked[1][1]
    assert [(name, given) for name, given, _ in policy.asked[:2]] == [("policy", first), ("policy", more)]
    assert [name for name, _, _ in policy.asked[2:]] == ["policy/2", "policy/2", "policy/3", "policy/3"], "no path forked"
    continued = RESULT.format("3") if not expected else ""
    observed = RESULT.format("3").removesuffix("\n") * len(expected) + "\n"
    wanted = observed if expected else continued.replace("tool", "user")
    assert more == known.encode(f"{wanted}<|im_start|>assistant\n"), "only what is new was tokenised"
    for agent in episode.spoke:
        assert [tuple(turn.generation.tokens.tolist()) for turn in agent.turns] == [(*known.encode(case["said"]), IM_END)] * 2
    if style != "hermes":
        assert {(read, parser) for read, parser, _ in policy.read} == {(case["said"], style)}
        schemas = [{"function": {k: v for k, v in tool["function"].items() if k != "description"}, "type": "function"} for tool in TOOLS]
        assert [*policy.read[-1][2]] == schemas
        assert [*policy.read[0][2]] == TOOLS


STRICT = """{%- set spoken = namespace(count=0) -%}
{%- for m in messages -%}
  {%- if m.role in ("user", "assistant") and not m.tool_calls -%}
    {%- if (m.role == "user") != (spoken.count % 2 == 0) -%}{{ raise_exception("user and assistant must alternate") }}{%- endif -%}
    {%- set spoken.count = spoken.count + 1 -%}
  {%- endif -%}
  {%- if m.role == "user" -%}<user>{{ m.content }}</user>
  {%- elif m.role == "tool" -%}
    {%- if (m.tool_call_id or "") | length != 9 -%}{{ raise_exception("an id has nine characters") }}{%- endif -%}
    <result>{{ m.content }}</result>
  {%- elif m.tool_calls -%}[TOOL_CALLS] {{ m.tool_calls | length }}<|im_end|>~
  {%- else -%}{{ m.content }}<|im_end|>~{%- endif -%}
{%- endfor -%}"""
"""A template with the rules of Mistral's: who calls tools does not count as speaking, and ids have nine characters."""


def test_a_template_that_wants_calls_as_such_gets_results_of_many_rounds(known: Tokenizer, tmp_path: Path) -> None:
    case = next(case for case in CASES if case["parser"] == "mistral" and len(case["calls"]) == 2)
    strict = openai_policy.tokenizer(tmp_path)
    strict._tokenizer.chat_template = STRICT
    policy = says(strict, case["said"])

    async def client(url: str, session: Session) -> None:
        messages: list[Any] = [*MESSAGES]
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as openais:
            for number in range(4):
                told = (await openais.chat.completions.create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
                results = [{"role": "tool", "tool_call_id": call.id, "content": str(number)} for call in told.tool_calls or []]
                messages += [told.to_dict(), *results]
        messages[-1]["tool_call_id"] = "too long an id"
        async with post(url, session, json.dumps({"messages": messages, "tools": TOOLS}).encode()) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "messages")

    episode = served(policy, strict, client, style="mistral")
    added = [strict.encode(f"~<result>{number}</result><result>{number}</result>") for number in range(3)]
    assert [(name, given) for name, given, _ in policy.asked] == [("policy", given) for given in (strict.encode("<user>a</user>"), *added)]
    (agent,) = episode.spoke
    assert len(agent.turns) == 4


def test_one_call_at_a_time_is_overridden_where_only_an_engine_reads_calls(known: Tokenizer) -> None:
    case = next(case for case in CASES if case["parser"] == "kimi_k2" and len(case["calls"]) == 2)
    body = json.dumps({"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}).encode()

    async def overridden(url: str, session: Session) -> None:
        async with post(url, session, body) as reply:
            assert reply.headers["asyncmoe-overridden"] == "parallel_tool_calls, tools"
            assert len((await reply.json())["choices"][0]["message"]["tool_calls"]) == 2

    served(says(known, case["said"]), known, overridden, style="kimi_k2")


def test_a_parser_that_fails_ends_the_episode_with_its_reason(known: Tokenizer) -> None:
    @dataclass
    class Dying(Parsing):
        async def parse(self, text: str, parser: str, tools: object) -> Sequence[ParsedCall]:
            raise TrajectoryRejected("engine_died", "it is gone")

    async def client(url: str, session: Session) -> None:
        for _ in range(2):
            async with post(url, session, json.dumps({"messages": MESSAGES, "tools": TOOLS}).encode()) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (503, "engine_died")

    policy = Dying(openai_policy.text(known, "hello"))
    episode = served(policy, known, client, style="llama3")
    with pytest.raises(TrajectoryRejected, match="it is gone"):
        _ = episode.spoke
    assert [name for name, _, _ in policy.asked] == ["policy", "policy/2"], "a repeated request does not continue the answer nobody got"
