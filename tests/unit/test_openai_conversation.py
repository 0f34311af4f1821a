"""Sampled tokens are never retokenised, however an agent edits the conversation; requests that would need it are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.models.make import VOCAB
from asyncmoe.rollout.episodes.environment import Bounds
from asyncmoe.rollout.episodes.openai_endpoint.chat import ChatApi
from asyncmoe.rollout.episodes.openai_endpoint.conversation import PolicyRequest, answered, begin, extend
from asyncmoe.rollout.episodes.openai_endpoint.messages import MessagesApi
from asyncmoe.rollout.episodes.openai_endpoint.parameters import Fields
from asyncmoe.rollout.episodes.openai_endpoint.request import Completion, CompletionRequest, RequestRefused
from asyncmoe.rollout.episodes.openai_endpoint.responses import ResponsesApi
from asyncmoe.rollout.episodes.openai_endpoint.session import CHAT, Session
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit import openai_policy
from tests.unit.asynchronous import asynchronous, until
from tests.unit.example_counts import examples
from tests.unit.openai_policy import EOS, IM_END, SAMPLING, Policy


def request(messages: list[dict[str, Any]], **fields: object) -> bytes:
    return json.dumps({"model": "policy", "messages": messages, **fields}).encode()


def parse(body: bytes, expected: Collection[str] = ()) -> CompletionRequest:
    """A request, of which the run overrides the parameters expected."""
    fields = Fields(body, SAMPLING)
    asked = ChatApi().parse(fields)
    assert set(fields.overridden) == set(expected)
    return asked


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(session: Session, messages: list[dict[str, Any]], **fields: object) -> tuple[dict[str, Any], Completion]:
    """The message a client gets."""
    asked, _ = session.parse(session.apis[CHAT], request(messages, **fields))
    answer = await session.answer(asked)
    return json.loads(json.dumps(session.apis[CHAT].whole(asked, answer)))["choices"][0]["message"], answer


def rest(known: Tokenizer, messages: list[dict[str, Any]], ended: int | None) -> tuple[int, ...]:
    """What the tiny model's template writes after an answer that ended with this token."""
    close = "\n" if ended == IM_END else "<|im_end|>\n"
    middle = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return known.encode(f"{close}{middle}<|im_start|>assistant\n")


SAID = st.lists(st.integers(0, VOCAB - 1).filter(lambda token: token not in (EOS, IM_END)), max_size=8)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
STEP = st.tuples(SAID, st.sampled_from([EOS, IM_END, None]), st.lists(TEXT, min_size=1, max_size=2), st.booleans(), st.integers(0, 5))


@settings(max_examples=examples(60))
@given(st.lists(STEP, min_size=1, max_size=7), st.integers(0, 2**32))
def test_tokens_are_those_given_and_sampled(known: Tokenizer, steps: list[Any], seed: int) -> None:
    random = Random(seed)
    said = iter([(*tokens, end) if end is not None else (*tokens, 7) for tokens, end, *_ in steps])
    policy = Policy(lambda seen: next(said))
    episode = policy.episode(known)

    async def talk() -> None:
        session = Session(episode)
        # (messages, tokens, last token or None where it was cut, agent) of every conversation, as an onlooker would write them down.
        heard: list[tuple[list[dict[str, Any]], tuple[int, ...], int | None, str]] = []
        for tokens, end, texts, fresh, which in steps:
            new = [user(text) for text in texts]
            if fresh or not heard:
                messages, before, name = new, (), f"policy/{len(heard) + 1}" if heard else "policy"
                expected = known.encode(known.render(new))
                # A conversation that begins like none before: the first message differs.
                if any(messages == other[0][: len(messages)] for other in heard):
                    messages = [user(f"{len(heard)} {random.random()}")]
                    expected = known.encode(known.render(messages))
                place = len(heard)
                heard.append((messages, (), None, name))
            else:
                place = which % len(heard)
                before_messages, before, ended, name = heard[place]
                messages, expected = before_messages + new, rest(known, new, ended)
            message, answer = await ask(session, messages)
            sampled = (*tokens, end) if end is not None else (*tokens, 7)
            assert policy.asked[-1] == (name, expected, sampled)
            assert message["content"] == known.decode(sampled)
            assert (answer.prompt_tokens, answer.sampled_tokens) == (len(before) + len(expected), len(sampled))
            heard[place] = ([*messages, message], (*before, *expected, *sampled), end, name)
        assert {agent.name: agent.tokens for agent in episode.agents.values()} == {name: tokens for _, tokens, _, name in heard}

    asyncio.run(talk())


def talk(known: Tokenizer, *turns: list[dict[str, Any]], words: str = "hello", **fields: object) -> Policy:
    """Requests one after the other."""
    policy = Policy(openai_policy.text(known, words))

    async def run() -> None:
        session = Session(policy.episode(known))
        for messages in turns:
            await ask(session, messages, **fields)

    asyncio.run(run())
    return policy


def names(policy: Policy) -> list[str]:
    return [name for name, _, _ in policy.asked]


HELLO = {"role": "assistant", "content": "hello"}


def test_whoever_changes_history_begins_a_new_conversation(known: Tokenizer) -> None:
    first = [user("a")]
    assert names(talk(known, first, [*first, HELLO, user("b")])) == ["policy", "policy"]
    for changed in (
        [user("a "), HELLO, user("b")],
        [*first, {**HELLO, "content": "hell"}, user("b")],
        [{"role": "system", "content": ""}, *first, HELLO, user("b")],
        [*first, HELLO],
    ):
        assert names(talk(known, first, changed)) == ["policy", "policy/2"], changed


def test_the_longest_conversation_is_continued(known: Tokenizer) -> None:
    one = [user("a")]
    two = [*one, HELLO, user("b")]
    three = [*two, HELLO, user("c")]
    assert names(talk(known, one, two, three)) == ["policy"] * 3
    # The second asks again where the first was; the third continues the longer of the two.
    assert names(talk(known, one, one, two, three)) == ["policy", "policy/2", "policy", "policy"]


def test_the_model_names_the_agent(known: Tokenizer) -> None:
    policy, first = Policy(openai_policy.text(known, "hello")), [user("a")]
    episode = policy.episode(known)

    async def talked() -> list[str]:
        session = Session(episode)
        turns = [("solver", first), ("checker", first), ("checker", [*first, HELLO, user("b")]), ("checker", [user("c")])]
        turns += [("solver/2", [user("d")]), ("solver", first), ("policy", first), ("a\r\nheader: b", [user("e")]), ("x" * 65, [user("f")])]
        return [(await ask(session, messages, model=model))[1].path for model, messages in turns]

    found = asyncio.run(talked())
    assert found == ["solver", "checker", "checker", "checker/2", "solver/2", "solver/3", "policy", "policy/2", "policy/3"]
    trees = {agent.name: agent.tree for agent in episode.agents.values()}
    assert (trees["solver/3"], trees["checker/2"]) == ("solver", "checker/2"), "a fork, and another agent"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_a_stop_token_with_text_of_its_own_is_not_taken_for_the_templates(known: Tokenizer) -> None:
    (newline,) = known.encode("\n")
    begun = begin(PolicyRequest((user("a"),), (user("a"),)), Lines(known))
    told = {"role": "assistant", "content": "hello\n"}
    heard = answered(begun, told, (*known.encode("hello"), newline), "stop", known)
    messages = (user("a"), told, user("b"))
    more = extend(heard, PolicyRequest(messages, messages), Lines(known))
    assert more.tokens == known.encode("\nuser: b\nassistant: ")


class Lines:
    """A template that ends what was said with a line's end."""

    def __init__(self, known: Tokenizer) -> None:
        self.encode, self.decode, self.check = known.encode, known.decode, known.check

    def render(self, messages: Any, tools: Any = (), variables: Any = None) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


def test_a_template_may_rewrite_history_and_gets_tools(known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, answer = [user("a")], {"role": "assistant", "content": " hello\n"}
    inner = known._tokenizer
    template = inner.chat_template.replace("message['content']", "message['content'] | trim")
    monkeypatch.setattr(inner, "chat_template", "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}" + template)
    policy = talk(known, first, [*first, answer, user("b")], words=" hello\n", tools=[TOOL])
    assert names(policy) == ["policy", "policy/2"]
    assert inner.decode(policy.asked[1][1]).startswith("f;<|im_start|>")
    assert "<|im_start|>assistant\nhello<|im_end|>" in inner.decode(policy.asked[1][1])
    assert inner.decode(talk(known, first, tools=[TOOL], tool_choice="none").asked[0][1]).startswith("<|im_start|>")


FUNCTION = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("api", "fields", "named"),
    [
        (ChatApi, {"n": 2}, "n"),
        (ChatApi, {"stop": ""}, "stop"),
        (ChatApi, {"max_tokens": 0}, "max_tokens"),
        (ChatApi, {"model": 3}, "model"),
        (ChatApi, {"tools": [{"type": "web_search"}]}, "tools[0]"),
        (ChatApi, {"tools": [{"type": "function", "function": {"name": "f", "cost": 1}}]}, "tools[0].cost"),
        (ChatApi, {"surprise": 1}, "surprise"),
        (ChatApi, {"messages": [{"role": "robot", "content": ""}]}, "messages[0]"),
        (ChatApi, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (ChatApi, {"messages": [{"role": "user", "content": "", "audio": {"id": "x"}}]}, "messages[0].audio"),
        (ChatApi, {"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
        (MessagesApi, {"messages": []}, "messages"),
        (MessagesApi, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0]"),
        (MessagesApi, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        (MessagesApi, {"messages": [{"role": "assistant", "content": "I"}]}, "messages"),
        (MessagesApi, {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "messages[0].content"),
        (MessagesApi, {"stop_sequences": [""]}, "stop_sequences"),
        (MessagesApi, {"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0]"),
        (MessagesApi, {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        (ResponsesApi, {"input": []}, "input"),
        (ResponsesApi, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (ResponsesApi, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        (ResponsesApi, {"input": [{"role": "user", "content": "a", "secret": 1}]}, "input[0].secret"),
        (ResponsesApi, {"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments"),
        (ResponsesApi, {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (ResponsesApi, {"tools": [{"type": "web_search"}]}, "tools[0]"),
        (ResponsesApi, {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0]"),
        (ResponsesApi, {"tools": [{**FUNCTION, "name": "n__f"}, {"type": "namespace", "name": "n", "tools": [FUNCTION]}]}, "tools"),
        (ResponsesApi, {"background": True}, "background"),
    ],
)
def test_what_is_refused_is_named(api: Any, fields: dict[str, Any], named: str) -> None:
    asked = {"input": "a"} if api is ResponsesApi else {"messages": [user("hi")]}
    with pytest.raises(RequestRefused) as refused:
        api().parse(Fields(json.dumps({**asked, **fields}).encode(), SAMPLING))
    assert (refused.value.status, refused.value.parameter) == (400, named)


def test_what_changes_nothing_is_taken() -> None:
    fields = {"temperature": 0.7, "top_k": -1, "n": 1, "stop": None, "presence_penalty": 0.0, "user": "me"}
    asked = parse(request([user("hi")], max_tokens=5, max_completion_tokens=7, stream_options={"include_usage": True}, **fields))
    assert (asked.most, asked.stream, asked.usage) == (5, False, True)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    message = {"role": "user", "content": parts, "refusal": None, "annotations": [], "reasoning_content": ""}
    assert parse(request([message])).asked.messages == ({"role": "user", "content": "hi"},)


def test_an_answer_may_be_cut_by_the_client(known: Tokenizer) -> None:
    assert talk(known, [user("a")], max_tokens=3).asked[0][2] == known.encode("hel")
    assert len(talk(known, [user("a")], words="x" * 200).asked[0][2]) == 100
    first = [user("a")]
    policy = talk(known, first, [*first, {**HELLO, "content": "hel"}, user("b")], max_tokens=3)
    assert policy.asked[1] == ("policy", rest(known, [user("b")], None), known.encode("hel"))


@asynchronous
async def test_conversations_and_turns_are_bounded_by_the_episode(known: Tokenizer) -> None:
    policy = Policy(openai_policy.text(known, "hello"))
    episode = policy.episode(known, Bounds(turns=1, tokens=1000, agents=2))
    session = Session(episode)
    for text in ("a", "b"):
        await ask(session, [user(text)])
    with pytest.raises(RequestRefused) as refused:
        await ask(session, [user("c")])
    assert (refused.value.code, refused.value.status) == ("episode_too_long", 400), "clients retry 503"
    assert episode.failure is not None


@asynchronous
async def test_a_cancelled_request_is_repeated_or_left_for_another_conversation(known: Tokenizer) -> None:
    hang = False
    policy = Policy(lambda seen: () if hang else (*known.encode("hello"), IM_END))
    episode = policy.episode(known)
    session = Session(episode)
    first = [user("a")]
    second = [*first, (await ask(session, first))[0], user("b")]
    hang = True
    slow = asyncio.create_task(ask(session, second))
    await until(lambda: policy.hanging)
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    hang = False
    await ask(session, [*second[:-1], user("c")])
    await ask(session, second)
    assert policy.cancelled == 1
    assert names(policy) == ["policy", "policy/2", "policy"]
    assert policy.asked[2][1] == rest(known, [user("b")], IM_END)
    assert [agent.name for agent in episode.spoke] == ["policy", "policy/2"]


CONFLICTS: dict[str, object] = {
    "temperature": 0,
    "top_k": 10**400,
    "seed": 7,
    "frequency_penalty": 1,
    "logit_bias": {"7": 1},
    "top_logprobs": 2,
}
CONFLICTS |= {"response_format": {"type": "json_schema"}, "tool_choice": "required", "reasoning_effort": "low"}


def test_the_runs_sampling_wins_and_the_parameters_are_named() -> None:
    parse(request([user("hi")], **CONFLICTS), CONFLICTS)
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    parse(request([user("hi")], tools=[strict]), ["tools.strict"])


@asynchronous
async def test_a_stop_text_is_kept_for_training_and_taken_from_the_client(known: Tokenizer) -> None:
    policy = Policy(openai_policy.text(known, "one;two"))
    session = Session(policy.episode(known))
    first = [user("a")]
    message, answer = await ask(session, first, stop=[";", "never"])
    assert (message["content"], answer.finish, answer.stopped_by, answer.sampled_tokens) == ("one", "stop", ";", 4)
    await ask(session, [*first, message, user("b")])
    assert policy.asked[0] == ("policy", known.encode(known.render([user("a")])), known.encode("one;"))
    # The conversation goes on from what was sampled, stop text included.
    assert policy.asked[1][:2] == ("policy", rest(known, [user("b")], None))


TWO_CALLS = 'a <tool_call>{"name":"f","arguments":{"x":1.0}}</tool_call> <tool_call>{"name":"f","arguments":{}}</tool_call> b'


def test_a_response_with_one_call_ends_with_it(known: Tokenizer) -> None:
    policy = talk(known, [user("a")], words=TWO_CALLS, tools=[TOOL], parallel_tool_calls=False)
    assert known.decode(policy.asked[0][2]) == TWO_CALLS.partition(' <tool_call>{"name":"f","arguments":{}}')[0]
    assert known.decode(talk(known, [user("a")], words=TWO_CALLS, tools=[TOOL]).asked[0][2]) == TWO_CALLS[:100]


@asynchronous
async def test_arguments_that_a_client_writes_anew_are_the_same_arguments(known: Tokenizer) -> None:
    policy = Policy(openai_policy.text(known, TWO_CALLS))
    session = Session(policy.episode(known))
    message, _ = await ask(session, [user("a")], tools=[TOOL])
    for arguments in ('{"x":1.0}', ' {"x" : 1e0} ', '{"x": 1}', '{"x": true}'):
        message["tool_calls"][0]["function"]["arguments"] = arguments
        await ask(session, [user("a"), message, {"role": "tool", "content": "2"}], tools=[TOOL])
    assert [given for _, given, _ in policy.asked[1:4]] == [rest(known, [{"role": "tool", "content": "2"}], None)] * 3
    assert policy.asked[4][1][:3] == policy.asked[0][1][:3], "another value begins another conversation"


def test_a_call_that_is_not_json_is_text(known: Tokenizer) -> None:
    words = '<tool_call>{"name":"f","arguments":{"x":NaN}}</tool_call>'
    policy = Policy(openai_policy.text(known, words))
    message, _ = asyncio.run(ask(Session(policy.episode(known)), [user("a")], tools=[TOOL]))
    assert message == {"role": "assistant", "content": words, "refusal": None}
