"""A client of an episode's endpoint, for the tests of each API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.rollout.episodes.openai_endpoint.server import OpenAIEndpoint
from asyncmoe.rollout.episodes.openai_endpoint.session import Session
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit import openai_policy
from tests.unit.openai_policy import Policy

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]


def served(
    policy: Policy,
    known: Tokenizer,
    client: Callable[[str, Session], Awaitable[None]],
    style: str = "hermes",
    episode: Episode | None = None,
    timeout_s: float = 60,
) -> Episode:
    """Let `client` speak to an episode, the policy's own unless another is given, by its URL."""
    episode = episode or policy.episode(known)

    async def run() -> None:
        endpoint = OpenAIEndpoint(style)
        try:
            session, url = await endpoint.open(episode)
            async with asyncio.timeout(timeout_s):
                await client(url, session)
            await endpoint.end(session)
        finally:
            await endpoint.close()

    asyncio.run(run())
    return episode


def says(known: Tokenizer, words: str = "hello") -> Policy:
    return Policy(openai_policy.text(known, words))


def post(url: str, session: Session, body: Any, key: str | None = None, path: str = "chat/completions") -> Any:
    headers = {"Authorization": f"Bearer {key or session.key}"}
    return aiohttp.request("POST", f"{url}/{path}", data=body, headers=headers)
