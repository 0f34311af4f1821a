"""OpenAI's own client drives an episode; a misbehaving client ends only its request or its episode."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds
from asyncmoe.rollout.episodes.openai_endpoint import server
from asyncmoe.rollout.episodes.openai_endpoint.environment import OpenAIEnvironment
from asyncmoe.rollout.episodes.openai_endpoint.server import OpenAIEndpoint
from asyncmoe.rollout.episodes.openai_endpoint.session import Session
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit import openai_agents, openai_policy
from tests.unit.asynchronous import until
from tests.unit.openai_policy import Policy
from tests.unit.openai_served import MESSAGES, post, says, served

AGENTS = "tests.unit.openai_agents"


def test_errors_reach_openais_client_as_its_own_and_are_not_repeated(known: Tokenizer) -> None:
    async def client(url: str, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=0)
            assert (refused.value.param, refused.value.message.rpartition("max_tokens ")[2][:4]) == ("max_tokens", "must")
            with pytest.raises(openai.InternalServerError) as failed:
                await client.chat.completions.create(model="policy", messages=[*MESSAGES, *MESSAGES], max_tokens=1)
            assert failed.value.code == "engine_failed"
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key + "x") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()

    class Failing(Policy):
        async def speak(self, *_: object) -> list[Any]:
            raise TrajectoryRejected("engine_failed", "it died")

    failed = served(Failing(lambda seen: ()), known, client)
    with pytest.raises(TrajectoryRejected, match="engine_failed"):
        _ = failed.spoke


def test_floods_and_garbage_are_refused_in_openais_form(known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_BYTES", 10000)

    async def endless() -> Any:
        while True:
            yield b" " * 1000

    async def client(url: str, session: Session) -> None:
        surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        for body, status in ((b"[" * 9000, 400), (b"x" * 20000, 413), (endless(), 413), (b"\xff\x00", 400), (b"[]", 400), (surrogate, 400)):
            try:
                async with post(url, session, body) as reply:
                    assert reply.status == status
                    assert (await reply.json())["error"]["message"]
            except aiohttp.ClientConnectionError:
                # The server has closed the connection while we were still sending.
                assert status == 413
        async with post(url, session, b"{}", key="é") as reply:
            assert reply.status == 401
        async with post(url, session, b"{}", path="embeddings") as reply:
            assert reply.status == 404
            assert (await reply.json())["error"]["type"] == "invalid_request_error"
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as ours:
            assert (await ours.chat.completions.create(model="policy", messages=MESSAGES)).choices[0].message.content == "hello"

    served(says(known), known, client)


def test_a_client_that_goes_away_ends_its_request_to_the_engine(known: Tokenizer) -> None:
    policy = Policy(lambda seen: ())

    async def client(url: str, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key, max_retries=0) as impatient:
            asking = asyncio.create_task(impatient.chat.completions.create(model="policy", messages=MESSAGES))
            await until(lambda: policy.hanging)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await until(lambda: policy.cancelled)
        policy.say = openai_policy.text(known, "hello")
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as patient:
            await patient.chat.completions.create(model="policy", messages=MESSAGES)

    made = served(policy, known, client)
    assert policy.hanging == policy.cancelled == 1
    assert [(agent.name, agent.tokens) for agent in made.spoke] == [("policy", (*policy.asked[0][1], *policy.asked[0][2]))]


def play(
    agent: str, policy: Policy, known: Tokenizer, episodes: int = 1, timeout_s: float = 30.0, bounds: Bounds | None = None
) -> list[Any]:
    """What each of the episodes came to: a reward, or why there is none."""

    async def one(environment: OpenAIEnvironment) -> Any:
        try:
            rewards, _ = await episode.play(environment, policy.episode(known, bounds), timeout_s)
            return rewards and rewards[0]
        except TrajectoryRejected as rejected:
            return rejected.reason

    async def run() -> list[Any]:
        environment = OpenAIEnvironment(f"{AGENTS}:{agent}")
        try:
            return await asyncio.gather(*(one(environment) for _ in range(episodes)))
        finally:
            await environment.close()

    return asyncio.run(run())


def test_an_agent_written_for_openai_drives_episodes_at_once(known: Tokenizer) -> None:
    openai_agents.keys.clear()
    policy = says(known, "2")
    assert play("two_turns", policy, known, episodes=6) == [1.0] * 6
    assert len(set(openai_agents.keys)) == 6
    assert {name for name, _, _ in policy.asked} == {"gpt-4o"}
    turn = known.encode("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    assert [given for _, given, _ in policy.asked].count(turn) == 6


@pytest.mark.parametrize("agent", ["blocking", "blocking_in_a_coroutine"])
def test_an_agent_that_blocks_blocks_only_itself(agent: str, known: Tokenizer) -> None:
    assert play(agent, says(known), known, episodes=4) == [None] * 4


@pytest.mark.parametrize(
    ("agent", "reason"), [("hangs", "environment_timeout"), ("rejects", "scorer_error"), ("lets_it_fail", "episode_too_long")]
)
def test_an_episode_ends_with_the_agents_reason_or_why_its_requests_failed(agent: str, reason: str, known: Tokenizer) -> None:
    openai_agents.released.clear()
    timeout_s = 0.2 if agent == "hangs" else 30.0
    assert play(agent, says(known), known, timeout_s=timeout_s, bounds=Bounds(turns=1, tokens=5, agents=1)) == [reason]
    assert agent != "hangs" or openai_agents.released.wait(10)


def test_with_the_episode_its_requests_end_and_its_key(known: Tokenizer) -> None:
    policy, body = Policy(lambda seen: ()), json.dumps({"messages": MESSAGES})

    async def run() -> None:
        endpoint = OpenAIEndpoint()
        session, url = await endpoint.open(policy.episode(known))

        async def status() -> int:
            async with post(url, session, body) as reply:
                return int(reply.status)

        asking = asyncio.create_task(status())
        await until(lambda: policy.hanging)
        await endpoint.end(session)
        assert (await asking, await status()) == (503, 401)
        await endpoint.close()

    asyncio.run(run())
    assert policy.cancelled == 1


def test_openais_client_is_told_what_was_overridden(known: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def client(url: str, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as client:
            create = client.chat.completions.with_raw_response.create
            for _ in range(3):
                raw = await create(model="policy", messages=MESSAGES, temperature=0.0, seed=3, logprobs=True, stop=";")
            assert raw.headers["asyncmoe-overridden"] == "temperature, seed, logprobs"
            assert [choice.message.content for choice in raw.parse().choices] == ["hello"]
            assert "asyncmoe-overridden" not in (await create(model="policy", messages=MESSAGES, temperature=0.7)).headers

    with caplog.at_level("WARNING"):
        served(says(known, "hello; world"), known, client)
    assert [record.args for record in caplog.records if "an agent sets" in record.msg] == [("temperature, seed, logprobs",)]


def test_a_stream_is_kept_alive_until_the_client_leaves_or_it_fails(known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ALIVE_S", 0.05)
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    fail = asyncio.Event()

    class Hangs(Policy):
        async def speak(self, agent: Any, given: Any, sampling: Any, listener: Any) -> list[Any]:
            if not self.cancelled:
                return await super().speak(agent, given, sampling, None)
            await fail.wait()
            raise TrajectoryRejected("engine_died", "it died")

    policy = Hangs(lambda seen: ())

    async def client(url: str, session: Session) -> None:
        async with post(url, session, body) as reply:
            assert [await reply.content.readline() for _ in range(4)] == [b": sampling\n", b"\n"] * 2
        await until(lambda: policy.cancelled)
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as client:
            streams = [
                await client.chat.completions.create(model="policy", messages=MESSAGES, stream=True),
                await client.responses.create(model="policy", input="a", stream=True),
            ]
            fail.set()
            for stream in streams:
                with pytest.raises(openai.APIError, match="it died"):
                    _ = [part async for part in stream]

    served(policy, known, client)
