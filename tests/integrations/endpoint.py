"""Serves one scripted episode to a real client, and counts what the client's conversation cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from asyncmoe.rollout.episodes.environment import Bounds, Episode
from asyncmoe.rollout.episodes.trajectory_builder import sampled
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit import openai_served
from tests.unit.openai_policy import IM_END, SAMPLING, Policy

BOUNDS = Bounds(turns=64, tokens=1 << 22, agents=16)
MAX_NEW_TOKENS = 4000

Client = Callable[[str, str], Awaitable[None]]
Agent = Callable[[str, str], Awaitable[float]]
"""Both get a base URL and a key; an agent returns its reward."""


def served(policy: Policy, known: Tokenizer, client: Client, timeout_s: float = 60) -> Episode:
    """Let a client speak to an episode; return the episode."""
    episode = policy.episode(known, BOUNDS, replace(SAMPLING, max_new_tokens=MAX_NEW_TOKENS))
    return openai_served.served(policy, known, lambda url, session: client(url, session.key), episode=episode, timeout_s=timeout_s)


def rewarded(policy: Policy, known: Tokenizer, agent: Agent, timeout_s: float = 60) -> tuple[float, Episode]:
    """Let an agent play an episode; its reward, and the episode."""
    rewards: list[float] = []

    async def client(url: str, key: str) -> None:
        rewards.append(await agent(url, key))

    episode = served(policy, known, client, timeout_s)
    return rewards[0], episode


def call(name: str, arguments: str) -> str:
    """A tool call as the policy writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def in_turn(known: Tokenizer, *words: str) -> Policy:
    """A policy that says these texts in turn, whoever asks, and the last one again and again."""
    left = list(words)

    def say(seen: tuple[int, ...]) -> tuple[int, ...]:
        return (*known.encode(left.pop(0) if len(left) > 1 else left[0]), IM_END)

    return Policy(say)


def sampled_in(episode: Episode) -> int:
    """How many tokens of an episode's trajectories the policy sampled."""
    return sum(int(sampled(agent.turns).sum()) for agent in episode.agents.values())


def one_conversation(policy: Policy, known: Tokenizer) -> None:
    """Every request continued the same conversation and gave only what was new: nothing sampled was tokenized again."""
    assert len({name for name, _, _ in policy.asked}) == 1
    given = [known.decode(tokens) for _, tokens, _ in policy.asked]
    for n, (_, _, said) in enumerate(policy.asked[:-1]):
        assert known.decode(said) not in given[n + 1]
