"""Content that a chat template drops is written another way, refused, or reported as a conflict, but never lost silently."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.engines.types import ParsedCall
from asyncmoe.errors import DataError
from asyncmoe.models.make import CHAT_TEMPLATE
from asyncmoe.rollout.episodes.openai_endpoint.request import RequestRefused
from asyncmoe.rollout.episodes.openai_endpoint.session import CHAT, MESSAGES, Session
from asyncmoe.rollout.tasks import Example
from asyncmoe.rollout.tasks.encode import Encoder
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit import openai_policy
from tests.unit.openai_policy import Policy


def template(system: str, assistant: str, call: str, tools: str = "", ending: str = "") -> str:
    """One in the manner of a family: `system` is its test of messages that it writes as they are."""
    said = f"<assistant>{assistant}{{% for call in m.tool_calls or [] %}}{call}{{% endfor %}}<|im_end|>"
    role = f"{{% if {system} %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% elif m.role == 'assistant' %}}{said}"
    loop = f"{{% for m in messages %}}{role}{{% elif m.role == 'tool' %}}<result>{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
    return f"{tools}{loop}{{% if add_generation_prompt %}}<assistant>{ending}{{% endif %}}"


TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
THINK = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% elif loop.last %}<think></think>{% endif %}{{ m.content }}"
OFF = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
QWEN3 = template("m.role in ('user', 'system')", THINK, "<tool_call>{{ call.function | tojson }}</tool_call>", TOOLS, OFF)
EITHER = "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
LLAMA3 = template("m.role not in ('assistant', 'tool')", EITHER, "{{ call | tojson }}", TOOLS)
JOINED = "{{ '<call>' + call.function.name + '<sep>' + call.function.arguments }}"
DEEPSEEK = template("m.role in ('user', 'system')", "{{ m.content }}", JOINED, ending="<think>\n")
# It supports a system message if it is the first.
ALONE = template("m.role == 'user' or loop.first", "{{ m.content }}", "").replace("tool'", "none'")
KEYS = ("tools", "name", "tool_calls", "reasoning_content", "content beside tool_calls")
ROLES = ("system at the beginning", "system", "developer", "tool")
KINDS = {key: key for key in KEYS} | {f"a message of the role {role}": role for role in ROLES}
USER, TOOL = {"role": "user", "content": "a"}, {"type": "function", "function": {"name": "look"}}
CALLS = [{"id": f"call0000{x}", "type": "function", "function": {"name": "look", "arguments": f'{{"x": {x}}}'}} for x in (1, 2)]
CALLED = {"role": "assistant", "content": "so", "tool_calls": CALLS}
RESULTS = [{"role": "tool", "content": f"told {call['id']}", "tool_call_id": call["id"]} for call in CALLS]
CALL = '<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture
def known(tmp_path: Path) -> Tokenizer:
    return openai_policy.tokenizer(tmp_path)


async def parse(text: str, parser: str, tools: Any) -> list[ParsedCall]:
    return [ParsedCall("look", "{}", text.replace("CALL", ""))] * text.count("CALL")


def ask(known: Tokenizer, template: str, messages: Any, style: str = "hermes", said: str = "", **fields: Any) -> Any:
    """The policy's input, the client's response, and the overridden parameters."""
    known._tokenizer.chat_template = template
    policy = Policy(openai_policy.text(known, said))
    episode = policy.episode(known)
    episode.sampling = replace(episode.sampling, max_new_tokens=1000)
    episode.parse = parse
    session = Session(episode, style)
    api = session.apis[fields.pop("api", CHAT)]
    asked, overridden = session.parse(api, json.dumps({"messages": messages, **fields}).encode())
    answer = asyncio.run(session.answer(asked))
    return known.decode_all(policy.asked[0][1]), answer, overridden


@pytest.mark.parametrize(
    ("template", "lacking"),
    [
        (CHAT_TEMPLATE, {"tools", "name", "tool_calls", "reasoning_content"}),
        (QWEN3, {"name", "developer"}),
        (LLAMA3, {"name", "content beside tool_calls", "reasoning_content"}),
        (DEEPSEEK, {"tools", "name", "reasoning_content", "developer"}),
        (ALONE, {"tools", "name", "tool_calls", "reasoning_content", "system", "developer", "tool"}),
    ],
)
def test_what_each_familys_template_leaves_out(known: Tokenizer, template: str, lacking: set[str]) -> None:
    known._tokenizer.chat_template = template
    assert {name for kind, name in KINDS.items() if known.lacks(kind)} == lacking


@pytest.mark.parametrize(
    ("template", "written"),
    [(CHAT_TEMPLATE, f"so\n{CALL}\n<tool_call>"), (QWEN3, f"<think>hm</think>so{CALL}<"), (DEEPSEEK, 'so<call>look<sep>{"x": 1}<call>')],
)
def test_a_foreign_history_is_written_with_results_in_the_order_of_their_calls(known: Tokenizer, template: str, written: str) -> None:
    called = {**CALLED, "reasoning_content": "hm" if template == QWEN3 else "", "name": None}
    histories = [[{"role": role, "content": "be"}, USER, called, *RESULTS[::-1], USER] for role in ("system", "developer")]
    given, same = (ask(known, template, history)[0] for history in histories)
    assert (given, written in given) == (same, True)
    assert given.index("be") < given.index("told call00001") < given.index("told call00002")


@pytest.mark.parametrize(
    ("template", "style", "message", "lost"),
    [
        (ALONE, "hermes", {"role": "developer", "content": "be"}, r"messages\[1\]: got a message of the role system"),
        (CHAT_TEMPLATE, "llama3", {"role": "assistant", "tool_calls": CALLS}, "tool_calls"),
        (CHAT_TEMPLATE, "hermes", {**CALLED, "reasoning_content": "hm"}, "reasoning_content"),
        (LLAMA3, "llama3", CALLED, "content beside tool_calls"),
    ],
)
def test_a_message_that_would_be_lost_is_refused(known: Tokenizer, template: str, style: str, message: Any, lost: str) -> None:
    with pytest.raises(RequestRefused, match=lost):
        ask(known, template, [USER, message, USER], style)


def test_what_frameworks_always_send_is_overridden(known: Tokenizer) -> None:
    assert ask(known, CHAT_TEMPLATE, [{**USER, "name": "Ann"}], tools=[TOOL])[2] == ["tools", "name"]


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize(
    ("template", "style", "said", "text"),
    [
        (QWEN3, "hermes", f"<think>{CALL}</think>so {CALL}", f"<think>{CALL}</think>so"),
        (DEEPSEEK, "hermes", f"{CALL}</think>so {CALL}", f"{CALL}</think>so"),
        (DEEPSEEK, "hermes", CALL, None),
        (QWEN3, "llama3", "<think>CALL</think>\nso CALL", "<think>CALL</think>\nso"),
        (DEEPSEEK, "llama3", "CALL[/THINK]so CALL", "CALL[/THINK]so"),
        (QWEN3, "llama3", "<think>CALL", None),
        (QWEN3, "llama3", "so CALL<think>CALL</think>", "so"),
    ],
)
def test_a_call_in_a_thought_is_text(known: Tokenizer, template: str, style: str, said: str, text: str | None, one: bool) -> None:
    _, answer, _ = ask(known, template, [USER], style, said, tools=[TOOL], parallel_tool_calls=not one)
    assert (len(answer.calls), answer.text) == ((0, said) if text is None else (1, text))


def test_variables_of_the_template(known: Tokenizer, tmp_path: Path) -> None:
    off = {"enable_thinking": False}
    for api in (CHAT, MESSAGES):
        assert ask(known, QWEN3, [USER], api=api, chat_template_kwargs=off)[0].endswith("</think>")
        with pytest.raises(RequestRefused, match=r"^chat_template_kwargs\.messages "):
            ask(known, QWEN3, [USER], api=api, chat_template_kwargs={**off, "messages": []})
    (tmp_path / "chat_template.jinja").write_text(QWEN3)
    run = Tokenizer(tmp_path, variables=off)
    assert run.decode_all(run.between(["4"])) == "<|im_end|><result>4<assistant><think></think>"
    assert not ask(run, QWEN3, [USER], chat_template_kwargs={"enable_thinking": True})[0].endswith("</think>")
    with pytest.raises(DataError, match=r"task\.chat_template_kwargs: got thinking, expected variables"):
        Tokenizer(tmp_path, variables={"thinking": True})


def test_prompts_and_answers_of_tools_that_would_be_lost_are_refused(known: Tokenizer) -> None:
    known._tokenizer.chat_template = ALONE
    with pytest.raises(DataError, match=r"^row 3, prompt\[1\]: got a message of the role system"):
        Encoder(known, chat=True).prompt(Example([USER, {"role": "system", "content": "c"}, USER], "d", where="row 3"))
    with pytest.raises(DataError, match="a message of the role tool, which the chat template leaves out"):
        known.between(["4"])
