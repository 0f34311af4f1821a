"""Answers have the fields and values that OpenAI's own types declare. Those of the Messages API: tests/integrations/test_clients.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

from asyncmoe.rollout.episodes.openai_endpoint.session import Session
from tests.unit import openai_policy
from tests.unit.openai_served import MESSAGES, post, says, served

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


async def told(url: str, session: Session, path: str, **body: Any) -> Any:
    """The answer, or the events of a stream."""
    async with post(url, session, json.dumps(body).encode(), path=path) as reply:
        lines = (await reply.text()).split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")] if body.get("stream") else json.loads(lines[0])


@pytest.mark.parametrize("said", ["hello", f"so {CALL} {CALL}", CALL, "x" * 200, "é🙂"])
def test_answers_are_of_openais_types(tmp_path: Path, said: str) -> None:
    tool: Any = {"name": "f", "description": "F"}
    chat: Any = {"messages": MESSAGES, "tools": [{"type": "function", "function": tool}], "logprobs": True}
    asked: Any = {"input": "a", "tools": [{"type": "function", **tool}], "include": ["message.output_text.logprobs"]}

    async def client(url: str, session: Session) -> None:
        whole: Any = ChatCompletion.model_validate(await told(url, session, "chat/completions", **chat, n=2))
        calls = [call.id for choice in whole.choices for call in choice.message.tool_calls or []]
        assert len(set(calls)) == len(calls)
        tokens = whole.choices[0].logprobs.content
        assert b"".join(bytes(one.bytes) for one in tokens).decode() == "".join(one.token for one in tokens).replace("\ufffd", "")
        parts = await told(url, session, "chat/completions", **chat, stream=True, stream_options={"include_usage": True})
        assert [part["usage"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        chunks: Any = [ChatCompletionChunk.model_validate(part) for part in parts]
        used = chunks[-1].usage
        assert (used.prompt_tokens, used.total_tokens - used.prompt_tokens) == (whole.usage.prompt_tokens, len(tokens))
        indices = [call.index for part in chunks for choice in part.choices for call in choice.delta.tool_calls or []]
        assert (indices, len({part.id for part in chunks})) == (list(range(len(calls) // 2)), 1)
        response = Response.model_validate(await told(url, session, "responses", **asked))
        *_, end = map(TypeAdapter(ResponseStreamEvent).validate_python, await told(url, session, "responses", **asked, stream=True))
        items = [item.id for item in (*response.output, *end.response.output)]
        assert len(set(items)) == len(items) == 2 * len(response.output)

    served(says(openai_policy.tokenizer(tmp_path), said), openai_policy.tokenizer(tmp_path), client)


def test_models_and_errors_are_of_openais_types(tmp_path: Path) -> None:
    async def client(url: str, session: Session) -> None:
        async with aiohttp.request("GET", f"{url}/models", headers={"Authorization": f"Bearer {session.key}"}) as reply:
            assert [Model.model_validate(one).id for one in (await reply.json())["data"]] == ["policy"]
        for path in ("chat/completions", "responses", "nothing"):
            ErrorObject.model_validate((await told(url, session, path))["error"])

    served(says(openai_policy.tokenizer(tmp_path)), openai_policy.tokenizer(tmp_path), client)
