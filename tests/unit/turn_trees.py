"""Episodes that fork as a test draws them, on engines that say what chance says and note every request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.types import Sampling, VersionSpan
from asyncmoe.rollout.episodes.environment import Agent, Episode
from asyncmoe.trajectory import Trajectory
from tests.unit.generations import generation_of


@dataclass
class Request:
    """What an engine was given and what it gave."""

    asked: tuple[int, ...]
    said: tuple[int, ...]


@dataclass
class RandomPool:
    """A pool whose engines say random tokens of `words` and then `end`."""

    words: Sequence[int]
    end: int
    random: Random
    requests: list[Request] = field(default_factory=list)
    lost_tokens: int = 0
    recomputed_tokens: int = 0

    async def generate(self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, **_: object) -> PooledGeneration:
        said = (*self.random.choices(self.words, k=self.random.randint(1, 3)), self.end)
        self.requests.append(Request(tuple(tokens), said))
        for _ in range(self.random.randint(0, 3)):
            await asyncio.sleep(0)
        logprobs = tuple(-0.1 - self.random.random() for _ in said)
        return PooledGeneration(generation_of(said, logprobs, (VersionSpan("1", 0, len(said)),), "stop", 0), 1)


@dataclass(frozen=True)
class Step:
    """A response of an agent: path `path` of the paths so far goes on, or is forked after `keep` of its responses; both modulo what there
    is. `agent`: it begins an agent of its own instead. `credit`: reward of the response as a step."""

    path: int
    keep: int | None
    agent: bool
    credit: float


class Grown:
    """An environment that takes these steps, one after another, and rewards each path by its name.

    Attributes:
        paths: by name of each path, the numbers of the steps whose responses are on it.
    """

    def __init__(self, steps: Sequence[Step], rewards: Sequence[float]) -> None:
        self.steps, self.rewards = steps, rewards
        self.paths: dict[str, list[int]] = {}
        self.scored: dict[str, float] = {}

    async def run(self, episode: Episode) -> dict[str, float]:
        agents: list[Agent] = []
        for number, step in enumerate(self.steps):
            if step.agent or not agents:
                agent, before = episode.agent(f"agent {number}"), []
                agents.append(agent)
            elif step.keep is None:
                agent = agents[step.path % len(agents)]
                before = self.paths[agent.name]
            else:
                other = agents[step.path % len(agents)]
                keep = step.keep % (len(other.responses) + 1)
                agent, before = episode.fork(other, keep), self.paths[other.name][:keep]
                agents.append(agent)
            agent.see([3 + number, 4] if agent.turns else [5, 6])
            await agent.respond()
            agent.credit(step.credit)
            self.paths[agent.name] = [*before, number]
        self.scored = dict(zip([agent.name for agent in episode.spoke], self.rewards, strict=False))
        return self.scored


def check_requests(trajectories: Sequence[Trajectory], requests: Sequence[Request]) -> None:
    """Every response is trained in one trajectory and context in all others that have it, and a trajectory has nothing else."""
    trained = [np.zeros(len(t), bool) for t in trajectories]
    for request in requests:
        begin, whole = len(request.asked), (*request.asked, *request.said)
        having = [i for i, t in enumerate(trajectories) if tuple(t.tokens[: len(whole)].tolist()) == whole]
        by = [i for i in having if trajectories[i].loss_mask[begin : len(whole)].all() and not trained[i][begin : len(whole)].any()]
        assert by, request
        trained[by[0]][begin : len(whole)] = True
    for t, mine in zip(trajectories, trained, strict=True):
        np.testing.assert_array_equal(t.loss_mask, mine)
        assert tuple(t.tokens.tolist()) in {(*one.asked, *one.said) for one in requests}
