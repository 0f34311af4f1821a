"""Episodes of drawn lengths: an environment in which what is said does not matter, only how long it takes."""

from __future__ import annotations

import asyncio

from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.simulate.workload import Episode as Lengths
from asyncmoe.simulate.workload import parse


class Drawn:
    """Turns of as many tokens, and tool calls of as many seconds, as `asyncmoe.simulate.workload` draws for a group and member.

    Args:
        workload: as for `asyncmoe simulate`.
        group_size: members of a group.
        tokens: a turn's lengths are multiplied by it (at least one token).
    """

    def __init__(self, workload: str, group_size: int, seed: int = 0, tokens: float = 1.0) -> None:
        self._groups = parse(workload).groups(group_size, seed)
        self._drawn: list[list[Lengths]] = []
        self._tokens = tokens

    async def run(self, episode: Episode) -> float:
        """See `Environment`. The reward is as good as random, so that there is something to train on."""
        turns, tools = self._lengths(episode.place.group, episode.place.episode)
        agent = episode.agent()
        agent.see(episode.prompt.tokens)
        said = 0
        for number, tokens in enumerate(turns):
            response = await agent.respond(max_new_tokens=max(1, round(tokens * self._tokens)), stop=())
            said += sum(response.tokens)
            if number < len(tools):
                await asyncio.sleep(tools[number])
                agent.see("ok")
        return float(said % 2)

    def _lengths(self, group: int, member: int) -> Lengths:
        while len(self._drawn) <= group:
            self._drawn.append(next(self._groups))
        return self._drawn[group][member]
