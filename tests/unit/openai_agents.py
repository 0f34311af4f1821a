"""Agents as users write them for OpenAI's API, good and bad."""

from __future__ import annotations

import asyncio
import threading

import openai

from asyncmoe.errors import TrajectoryRejected

keys: list[str] = []
released = threading.Event()


async def two_turns(base_url: str, api_key: str, prompt: str, answer: str) -> float:
    keys.append(api_key)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": prompt}]
        first = await client.chat.completions.create(model="gpt-4o", messages=messages)
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "sure?"}]
        second = await client.chat.completions.create(model="gpt-4o", messages=messages)
        assert first.model == "gpt-4o"
        assert second.usage.prompt_tokens > first.usage.total_tokens
        return float(second.choices[0].message.content == answer)


def blocking(base_url: str, api_key: str, prompt: str, answer: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])


async def blocking_in_a_coroutine(base_url: str, api_key: str, prompt: str, answer: str) -> None:
    blocking(base_url, api_key, prompt, answer)


async def rejects(base_url: str, api_key: str, prompt: str, answer: str) -> None:
    raise TrajectoryRejected("scorer_error", "the judge is away")


async def hangs(base_url: str, api_key: str, prompt: str, answer: str) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        released.set()


async def lets_it_fail(base_url: str, api_key: str, prompt: str, answer: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
