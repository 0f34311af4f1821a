"""Tools of typed parameters, and their schemas in the chat template."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.environment import EnvironmentSection
from asyncmoe.config.tool_parsers import SGLANG_PARSERS
from asyncmoe.engines.types import ParsedCall
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.chat_template import CALL_ID
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.episodes.tools import loading
from asyncmoe.rollout.episodes.tools.runner import Runner
from asyncmoe.rollout.episodes.tools.tool import ToolError
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit import openai_policy
from tests.unit.test_environment_tools import Scripted, parts, play

FUNCTIONS = "tests.unit.tool_functions"
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


def tool(name: str) -> Runner:
    (runner,) = loading.load([f"{FUNCTIONS}:{name}"]).values()
    return runner


def test_a_signature_and_a_docstring_become_a_schema() -> None:
    flight = tool("find_flight")
    assert flight.description == "Finds a flight."
    assert flight.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["origin", "day"],
        "properties": {
            "origin": {"type": "string", "description": "the airport it leaves, by its code."},
            "day": {"type": "integer", "description": "of the year"},
            "copy": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
            "cabin": {"type": "string", "enum": ["economy", "first"], "default": "economy"},
        },
    }
    assert tool("shout").parameters == {
        "type": "object",
        "properties": {"argument": {"type": "string", "description": ""}},
        "required": ["argument"],
    }


def test_calls_are_checked_and_converted_where_the_function_runs() -> None:
    async def run() -> None:
        flight = tool("find_flight")
        try:
            assert await flight.call('{"origin": "é", "day": 3, "copy": ["a"]}') == "'é' 4 ['a'] economy"
            assert await flight.call('{"origin": "B", "day": "4", "cabin": "first"}') == "'B' 5 None first"
            for wrong, said in (
                ('{"origin": "B"}', "day: Field required"),
                ('{"origin": "B", "day": 1.5}', "day: "),
                ('{"origin": "B", "day": 1, "cabin": "third"}', "cabin: "),
                ('{"origin": "B", "day": 1, "_x": 2}', "_x: Extra inputs"),
                ("Berlin", "arguments: Invalid JSON"),
                ("[" * 10000, "arguments: "),
            ):
                with pytest.raises(ToolError, match=said) as refused:
                    await flight.call(wrong)
                assert refused.value.reason == "tool_error"
        finally:
            await flight.close()
        assert await tool("find_flight_later").call('{"origin": "B"}') == "B 7"

    asyncio.run(run())


@pytest.mark.parametrize("degrees", ["NaN", "1e400", "-Infinity"])
def test_a_number_that_json_has_not_is_an_observation(degrees: str) -> None:
    async def run() -> None:
        runner = tool("warmer")
        try:
            with pytest.raises(ToolError, match="tool_error: error: arguments that are not valid JSON: "):
                await runner.call(f'{{"degrees": {degrees}}}')
        finally:
            await runner.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["anything", "mystery"])
def test_parameters_that_no_call_can_give_are_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.tools\.names.*" + name):
        tool(name)


def test_the_template_describes_the_tools(known: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    name = f"{FUNCTIONS}:find_flight"
    plain = Prompt("a", known.encode("a"), "")
    chat = Prompt("a", known.chat("a"), "", messages=({"role": "user", "content": "a"},))
    with caplog.at_level(logging.WARNING):
        ignoring = WithTools([name])
        assert [ignoring.asked(one, known) for one in (chat, chat, plain)] == [chat.tokens, chat.tokens, plain.tokens]
    assert [record.message for record in caplog.records if "leaves tools out" in record.message] != []
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match=r"environment\.tools\.schemas"):
        WithTools([name], schemas=True).described(known)
    monkeypatch.setattr(known._tokenizer, "chat_template", TEMPLATE)
    text = known.decode(WithTools([name]).asked(chat, known))
    assert '"origin"' in text
    assert text.endswith("a")
    assert WithTools([name]).asked(plain, known) == plain.tokens
    assert WithTools([name], "qwen3_coder").asked(chat, known) != chat.tokens
    assert WithTools([name], schemas=False).asked(chat, known) == chat.tokens
    assert WithTools([name], "brackets").asked(chat, known) == chat.tokens


def test_a_call_of_several_arguments_reaches_the_function(known: Tokenizer) -> None:
    call = '<tool_call>{"name": "find_flight", "arguments": {"origin": "B", "day": 1}}</tool_call>'
    wrong = '<tool_call>{"name": "find_flight", "arguments": {"origin": "B"}}</tool_call>'
    made = play(WithTools([f"{FUNCTIONS}:find_flight"]), known, call, wrong, "42")
    given = [text for sampled, text in parts(made, known) if not sampled]
    assert "'B' 2 None economy" in given[1]
    assert "error: day: Field required" in given[2]


class Parsing(Scripted):
    """Its engines' parser finds a call wherever a response says so, as it is told."""

    def __init__(self, tokenizer: Tokenizer, found: Sequence[ParsedCall], *lines: str) -> None:
        super().__init__(tokenizer, *lines)
        self.found, self.parsed = found, list[tuple[str, str, str]]()

    async def parse_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[ParsedCall]:
        self.parsed.append((text, parser, str(tools[0]["function"]["name"])))
        return self.found if "call" in text else ()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ('{"origin": "B", "day": 1}', "'B' 2 None economy"),
        ("", "error: origin: Field required"),
        ("{", "error: a call that is not valid JSON"),
        ("[1]", "error: a call is"),
        ("1" * 70000, "error: a call of 70000 characters"),
    ],
)
def test_calls_are_read_by_a_parser_of_the_engine(known: Tokenizer, parameters: str, said: str) -> None:
    pool = Parsing(known, [ParsedCall("find_flight", parameters)], "call!<|im_end|>", "42")
    made = play(WithTools([f"{FUNCTIONS}:find_flight"], "qwen3_coder"), known, pool=pool)
    assert [(parser, tool) for _, parser, tool in pool.parsed] == [("qwen3_coder", "find_flight")] * 2
    # Special tokens are part of some formats; the token that ended the response is not.
    assert [text for text, _, _ in pool.parsed] == ["call!<|im_end|>", "42"]
    assert said in [text for sampled, text in parts(made, known) if not sampled][1]


@pytest.mark.parametrize(("style", "ids"), [("kimi_k2", "functions.{}:{}"), ("kimi_k3", "{}:{}"), ("mistral", CALL_ID)])
def test_the_ids_that_a_policy_writes_come_back_with_the_answers(known: Tokenizer, style: str, ids: str, tmp_path: Path) -> None:
    kimi = openai_policy.tokenizer(tmp_path)
    kimi._tokenizer.chat_template = "{% for m in messages %} {{ m.tool_call_id }} {{ m.content }}<|im_end|>{% endfor %}"
    prompt = Prompt("a", kimi.encode("a "), "42", messages=({"role": "assistant", "content": "b", "tool_calls": [{}, {}]},))
    pool = Parsing(kimi, [ParsedCall("find_flight", "{}"), ParsedCall("no", "{")], "call", "call", "42")
    made = play(WithTools([f"{FUNCTIONS}:find_flight"], style, schemas=False), kimi, pool=pool, prompt=prompt)
    given = " ".join(text for sampled, text in parts(made, kimi) if not sampled)
    assert re.findall(r"(\S+) error", given) == [ids.format(name, at) for at, name in enumerate(("find_flight", "no") * 2, 2)]


def test_a_parser_that_sglang_does_not_have_is_refused_with_those_it_has() -> None:
    said = r"environment\.tools\.style: got 'qwen3_code', expected hermes.*kimi_k2.*did you mean qwen3_coder\?"
    with pytest.raises(ValueError, match=said):
        EnvironmentSection.model_validate({"kind": "tools", "tools": {"names": ["calculator"], "style": "qwen3_code"}})


def test_the_names_of_sglangs_parsers_are_sglangs() -> None:
    found = sorted(Path(".venv-engine").glob("lib/python3*/site-packages/sglang/srt/function_call/function_call_parser.py"))
    if not found:
        pytest.skip("no SGLang in .venv-engine")
    table = next(
        node.value
        for node in ast.walk(ast.parse(found[0].read_text()))
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "ToolCallParserEnum"
    )
    assert isinstance(table, ast.Dict)
    names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
    left_out = {"hermes", "response_template", "deepseekv4", "deepseekv41", "beam", "glm47", "iquest_q1"}
    assert names - left_out == set(SGLANG_PARSERS)
