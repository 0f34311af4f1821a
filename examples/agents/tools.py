"""Sums too hard for a tiny model: it learns to ask a calculator, or to write a line of Python."""

from __future__ import annotations

from asyncmoe.rollout.episodes.environment import Agent, Episode
from asyncmoe.rollout.episodes.environments.tools import WithTools


class SumsWithTools(WithTools):
    """`[12+34]` asks the calculator, `[python: print(12+34)]` the sandboxed Python; the configured scorer scores the last response.

    Args:
        careless: share of the warm-up's demonstrations, 0 to 1, in which the teacher guesses instead of asking.
    """

    def __init__(self, careless: float = 0.0) -> None:
        super().__init__(("calculator", "python"), style="brackets", chat=False)
        self._careless = careless

    def demonstrate(self, agent: Agent, episode: Episode) -> str:
        """The teacher's response: a guess, or a call of a tool and then the tool's answer."""
        if agent.responses:
            return agent.text.rstrip("\n").rpartition("]")[2]
        question = episode.prompt.text.rstrip("=")
        if episode.random.random() < self._careless:
            return str(episode.random.randrange(200))
        return f"[python: print({question})]" if episode.random.random() < 0.2 else f"[{question}]"
