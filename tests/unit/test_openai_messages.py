"""Anthropic's Messages API. With its own client: tests/integrations/test_clients.py."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from asyncmoe.rollout.episodes.openai_endpoint.session import Session
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit.openai_served import MESSAGES, post, says, served


def test_anthropics_api_calls_tools_streams_and_counts(known: Tokenizer) -> None:
    policy = says(known, 'so <tool_call>{"name": "f", "arguments": {"x": 1.0}}</tool_call>')
    tool = {"name": "f", "input_schema": {"type": "object"}}

    async def client(url: str, session: Session) -> None:
        async def send(path: str, **fields: Any) -> Any:
            body = json.dumps({"model": "policy", "max_tokens": 90, "tools": [tool], **fields})
            async with aiohttp.request("POST", f"{url}/{path}", data=body, headers={"x-api-key": session.key}) as reply:
                assert reply.status == 200, await reply.text()
                return await reply.text()

        told = json.loads(await send("messages", messages=MESSAGES, system="be"))
        assert told["content"][0] == {"type": "text", "text": "so"}
        assert (told["content"][1]["input"], told["stop_reason"]) == ({"x": 1.0}, "tool_use")
        result = {
            "type": "tool_result",
            "tool_use_id": told["content"][1]["id"],
            "content": [{"type": "text", "text": "2"}],
            "is_error": True,
        }
        # JavaScript writes 1.0 as 1.
        told["content"][1]["input"] = {"x": 1}
        messages = [*MESSAGES, {"role": "assistant", "content": told["content"]}, {"role": "user", "content": [result]}]
        lines = (await send("v1/messages", messages=messages, system="be", stream=True)).split("\n\n")[:-1]
        events = [json.loads(line.split("\n")[1].removeprefix("data: ")) for line in lines]
        assert [line.split("\n")[0].removeprefix("event: ") for line in lines] == [event["type"] for event in events]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == "so"
        assert deltas[-1] == {"type": "input_json_delta", "partial_json": '{"x": 1.0}'}
        assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
        counted = json.loads(await send("messages/count_tokens", messages=MESSAGES, system="be"))
        assert counted == {"input_tokens": len(policy.asked[0][1])}
        asked: Any = {"messages": [{"role": "user", "content": "z"}], "stop_sequences": ["o"], "tools": []}
        stopped = json.loads(await send("messages", **asked))
        assert (stopped["content"], stopped["stop_reason"]) == ([{"type": "text", "text": "s"}], "stop_sequence")
        assert stopped["stop_sequence"] == "o"
        async with post(url, session, json.dumps({"messages": []}).encode(), path="messages") as reply:
            assert (reply.status, (await reply.json())["type"]) == (400, "error")

    served(policy, known, client)
    assert [name for name, _, _ in policy.asked] == ["policy", "policy", "policy/2"]
    assert policy.asked[1][1] == known.encode("\n<|im_start|>tool\nerror: 2<|im_end|>\n<|im_start|>assistant\n")
