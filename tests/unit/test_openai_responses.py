"""The Responses API, spoken by OpenAI's own client; and the fields of answers, by OpenAI's own types."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

from asyncmoe.rollout.episodes.openai_endpoint.session import Session
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit.openai_served import MESSAGES, post, says, served

FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def test_openais_client_speaks_the_responses_api(known: Tokenizer) -> None:
    policy = says(known, 'so <tool_call>{"name": "f", "arguments": {"x": 1.0, "é": "ü"}}</tool_call>')

    async def client(url: str, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as client:
            raw = await client.responses.with_raw_response.create(
                model="policy", input="a", instructions="be", tools=[FUNCTION], temperature=0
            )
            assert raw.headers["asyncmoe-overridden"] == "tools.strict, temperature, tools"
            first = raw.parse()
            assert (first.temperature, first.status, first.usage is not None) == (0.7, "completed", True)
            asked: Any = [{"role": "user", "content": "b"}]
            again: Any = {"model": "policy", "instructions": "be", "tools": [FUNCTION]}
            second = await client.responses.create(input=asked, previous_response_id=first.id, **again)
            assert second.usage.input_tokens > first.usage.total_tokens  # type: ignore[union-attr]
            stream = await client.responses.create(input="c", previous_response_id=second.id, stream=True, **again)
            events: list[Any] = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type for event in events]
            assert kinds[:4] == [f"response.{k}" for k in ("created", "in_progress", "output_item.added", "content_part.added")]
            assert (kinds.count("response.output_item.done"), kinds[-1]) == (2, "response.completed")
            assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
            cut = await client.responses.create(model="policy", input="z", max_output_tokens=1)
            assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            with pytest.raises(openai.NotFoundError, match="no response"):
                await client.responses.create(model="policy", input="z", previous_response_id="resp_0")

    served(policy, known, client)
    assert [name for name, _, _ in policy.asked] == ["policy"] * 3 + ["policy/2"]
    assert policy.asked[1][1] == known.encode("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")


def test_functions_of_namespaces_are_called_by_their_full_names(known: Tokenizer) -> None:
    policy = says(known, '<tool_call>{"name": "maps__find", "arguments": {"x": 1}}</tool_call>')
    inner: Any = {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}
    tools: Any = [{"type": "namespace", "name": "maps", "description": "Maps", "tools": [inner]}, {**inner, "name": "maps__far"}]

    async def client(url: str, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="another", default_headers={"x-api-key": session.key}) as client:
            first = await client.responses.create(model="policy", input="a", tools=tools, extra_body={"client_metadata": {"a": "b"}})
            (called,) = first.output
            assert (called.namespace, called.name) == ("maps", "find")
            result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "here"}
            given: Any = [{"role": "user", "content": "a"}, called.to_dict(), result]
            events = [event async for event in await client.responses.create(model="policy", input=given, tools=tools, stream=True)]
            (again,) = events[-1].response.output  # type: ignore[union-attr]
            assert (again.namespace, again.name) == ("maps", "find")  # type: ignore[union-attr]

    served(policy, known, client)
    assert {name for name, _, _ in policy.asked} == {"policy"}


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


async def told(url: str, session: Session, path: str, **body: Any) -> Any:
    """The answer, or the events of a stream."""
    async with post(url, session, json.dumps(body).encode(), path=path) as reply:
        lines = (await reply.text()).split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")] if body.get("stream") else json.loads(lines[0])


@pytest.mark.parametrize("said", [f"so {CALL} {CALL}", CALL, "x" * 200, "é🙂"])
def test_answers_are_of_openais_types(known: Tokenizer, said: str) -> None:
    chat: Any = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}
    asked: Any = {"input": "a", "tools": [{"type": "function", "name": "f"}]}

    async def client(url: str, session: Session) -> None:
        whole: Any = ChatCompletion.model_validate(await told(url, session, "chat/completions", **chat))
        calls = [call.id for call in whole.choices[0].message.tool_calls or []]
        assert len(set(calls)) == len(calls)
        parts = await told(url, session, "chat/completions", **chat, stream=True, stream_options={"include_usage": True})
        assert [part["usage"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        chunks: Any = [ChatCompletionChunk.model_validate(part) for part in parts]
        assert chunks[-1].usage == whole.usage
        indices = [call.index for part in chunks for choice in part.choices for call in choice.delta.tool_calls or []]
        assert (indices, len({part.id for part in chunks})) == (list(range(len(calls))), 1)
        response = Response.model_validate(await told(url, session, "responses", **asked))
        *_, end = map(TypeAdapter(ResponseStreamEvent).validate_python, await told(url, session, "responses", **asked, stream=True))
        items = [item.id for item in (*response.output, *end.response.output)]
        assert len(set(items)) == len(items) == 2 * len(response.output)

    served(says(known, said), known, client)


def test_models_and_errors_are_of_openais_types(known: Tokenizer) -> None:
    async def client(url: str, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as client:
            raw = await client.models.with_raw_response.list()
        assert [Model.model_validate(one).id for one in json.loads(raw.content)["data"]] == ["policy"]
        for path in ("chat/completions", "responses", "nothing"):
            ErrorObject.model_validate((await told(url, session, path))["error"])

    served(says(known), known, client)
