"""Episodes of drawn lengths: an environment in which contents do not matter, only lengths."""

from __future__ import annotations

import asyncio
from random import Random

from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.simulate.workload import Episode as Lengths
from asyncmoe.simulate.workload import parse


class Drawn:
    """Turns with the tokens, and tool calls with the seconds, that `asyncmoe.simulate.workload` draws for a group and member.

    Args:
        workload: as for `asyncmoe simulate`.
        group_size: members of a group.
        tokens: factor on a turn's length (at least one token).
        given: tokens of the prompt beyond the task's, specific to the group; 0: none.
        observed: tokens of a tool's result; 0: a short one.
    """

    def __init__(self, workload: str, group_size: int, seed: int = 0, tokens: float = 1.0, given: int = 0, observed: int = 0) -> None:
        self._given, self._observed = given, observed
        self._groups = parse(workload).groups(group_size, seed)
        self._drawn: list[list[Lengths]] = []
        self._tokens = tokens

    async def run(self, episode: Episode) -> float:
        """See `Environment`. The reward is practically random, so that there is something to train on."""
        turns, tools = self._lengths(episode.place.group, episode.place.episode)
        agent = episode.agent()
        group, prompt = Random(episode.place.group), episode.prompt.tokens
        agent.see((*prompt, *group.choices(prompt, k=self._given)))
        said = 0
        for number, tokens in enumerate(turns):
            response = await agent.respond(max_new_tokens=max(1, round(tokens * self._tokens)), stop=())
            said += sum(response.tokens)
            if number < len(tools):
                await asyncio.sleep(tools[number])
                agent.see(tuple(group.choices(prompt, k=self._observed)) or "ok")
        return float(said % 2)

    def _lengths(self, group: int, member: int) -> Lengths:
        while len(self._drawn) <= group:
            self._drawn.append(next(self._groups))
        return self._drawn[group][member]
