"""An environment whose agent speaks twice, at length, and in between waits as for a tool."""

from __future__ import annotations

import asyncio

from asyncmoe.rollout.episodes.environment import Agent, Episode


class Pausing:
    async def run(self, episode: Episode) -> float:
        agent = episode.agent()
        agent.see(episode.prompt.tokens)
        await agent.respond(stop=())
        await asyncio.sleep(0.3)
        agent.see(episode.prompt.tokens)
        return len((await agent.respond()).text) / 10

    def demonstrate(self, agent: Agent, episode: Episode) -> str:
        return episode.prompt.answer
