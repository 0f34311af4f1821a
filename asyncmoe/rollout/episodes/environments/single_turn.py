"""One response to the prompt, scored by the configured scorer."""

from __future__ import annotations

from asyncmoe.rollout.episodes.environment import Episode


class SingleTurn:
    """The simplest environment."""

    async def run(self, episode: Episode) -> None:
        """See `Environment`."""
        agent = episode.agent()
        agent.see(episode.prompt.tokens)
        await agent.respond()
