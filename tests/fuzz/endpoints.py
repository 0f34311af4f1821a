"""Bodies to our HTTP endpoints, and hostile answers to our HTTP clients."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from aiohttp import web

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes.openai_endpoint.server import OpenAIEndpoint
from asyncmoe.rollout.scoring import Sample, Scorer, loading
from tests.fuzz import mutate
from tests.unit import openai_policy

_AT_ONCE = 8
_OF_AN_EPISODE = 400
"""Requests of one episode, fewer than it has turns."""
_TOOL = {"type": "function", "function": {"name": "f", "description": "adds", "parameters": {"type": "object", "properties": {"x": {}}}}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_CHAT: list[Any] = [
    {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}], "temperature": 0.7},
    {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stream": True, "n": 1, "max_tokens": 5},
    {
        "model": "m",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "stop": ["x"],
        "logprobs": True,
        "response_format": {"type": "json_object"},
    },
]
_RESPONSES: list[Any] = [
    {"model": "m", "input": "1+1=", "instructions": "s", "max_output_tokens": 9},
    {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "stream": True, "store": False},
    {
        "model": "m",
        "input": [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "previous_response_id": "resp_1",
    },
]
_MESSAGES: list[Any] = [
    {"model": "m", "max_tokens": 9, "system": "s", "messages": [{"role": "user", "content": "1+1="}], "stream": True},
    {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
    },
]
BODIES = {"chat/completions": _CHAT, "responses": _RESPONSES, "messages": _MESSAGES, "messages/count_tokens": _MESSAGES}
"""Requests as agents send them, by endpoint."""


def openai(path: str, random: Random, count: int) -> dict[str, int]:
    """Post `count` mutated bodies to one path of the endpoint of episodes; return the statuses. Afterwards it answers a right one."""
    return asyncio.run(_openai(path, random, count))


async def _openai(path: str, random: Random, count: int) -> dict[str, int]:
    corpus, statuses = [json.dumps(body).encode() for body in BODIES[path]], Counter[str]()
    endpoint = OpenAIEndpoint()
    with tempfile.TemporaryDirectory() as folder:
        known = openai_policy.tokenizer(Path(folder))
        policy = openai_policy.Policy(openai_policy.text(known, "hello"))
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as client:
            for begin in range(0, count, _OF_AN_EPISODE):
                session, url = await endpoint.open(policy.episode(known))
                headers = {"Authorization": f"Bearer {session.key}"}

                async def post(body: bytes, url: str = url, headers: dict[str, str] = headers) -> int:
                    async with client.post(f"{url}/{path}", data=body, headers=headers) as answer:
                        await answer.read()
                        return answer.status

                for left in range(min(_OF_AN_EPISODE, count - begin), 0, -_AT_ONCE):
                    bodies = [mutate.jsons(random, corpus) for _ in range(min(_AT_ONCE, left))]
                    for body, status in zip(bodies, await asyncio.gather(*map(post, bodies)), strict=True):
                        assert status < 500, f"{path} answered {status} to {body!r}"
                        statuses[str(status)] += 1
                await endpoint.end(session)
                policy.asked.clear()
            session, url = await endpoint.open(policy.episode(known))
            assert await post(corpus[0], url, {"Authorization": f"Bearer {session.key}"}) == 200, f"{path} afterwards"
            await endpoint.end(session)
    finally:
        await endpoint.close()
    return dict(statuses)


_SAMPLE = Sample("1+1=", "2", "2", (10, 11, 12, 10, 13), (False, True, True, False, True), "solver", {})
_ANSWERS = [json.dumps(one).encode() for one in ({"reward": 0.5, "steps": [1, -0.25]}, {"reward": 1}, {"reward": 0, "tokens": [0.0] * 5})]


def judge(random: Random, count: int) -> dict[str, int]:
    """Have a scorer behind HTTP answer `count` times with mutated scores; return what became of them. Afterwards a right one is read."""
    return asyncio.run(_judge(random, count))


async def _judge(random: Random, count: int) -> dict[str, int]:
    found, answer = Counter[str](), b""

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, status=200 if random.random() < 0.9 else random.choice((204, 302, 404, 429, 500, 599)))

    async def call(made: Scorer) -> str:
        try:
            score = await made.score(_SAMPLE)
        except TrajectoryRejected as rejected:
            return rejected.reason
        assert abs(score.reward) < float("inf"), answer
        return "scored"

    made = await _served(handler)
    try:
        for _ in range(count):
            answer = mutate.jsons(random, _ANSWERS)
            found[await call(made[0])] += 1
        random.seed(0)
        answer = _ANSWERS[0]
        assert "scored" in [await call(made[0]) for _ in range(20)]
    finally:
        await made[0].close()
        await made[1].cleanup()
    return dict(found)


async def _served(handler: Callable[[web.Request], Awaitable[web.Response]]) -> tuple[Scorer, web.AppRunner]:
    app = web.Application()
    app.router.add_post("/judge", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    values = {"retries": 0, "scorer": f"http://127.0.0.1:{port}/judge"}
    section = ScoringSection.model_validate(values)
    return loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: ""), runner
