"""Two agents of one policy: one answers the question, the other says whether the answer is right.

Both conversations of an episode become trajectories, and stand or fall together. Each agent has its own reward, and is compared with the
same agent in the other episodes of the group.
"""

from __future__ import annotations

from asyncmoe.rollout.episodes.environment import Agent, Episode

RIGHT, WRONG = "y", "n"


class SolverAndChecker:
    """The solver gets the question; the checker gets the question and what the solver said.

    Args:
        careless: share of the warm-up's demonstrations, 0 to 1, in which the teacher says something at random.
    """

    def __init__(self, careless: float = 0.0) -> None:
        self._careless = careless

    async def run(self, episode: Episode) -> dict[str, float]:
        """Rewards: the solver's for the right answer, the checker's for the right verdict."""
        solver, checker = episode.agent("solver"), episode.agent("checker")
        solver.see(episode.prompt.tokens)
        answer = (await solver.respond()).text.strip()
        checker.see(f"{episode.prompt.text}{answer}?")
        verdict = (await checker.respond()).text.strip()
        solved = answer == episode.prompt.answer
        return {"solver": float(solved), "checker": float(verdict == (RIGHT if solved else WRONG))}

    def demonstrate(self, agent: Agent, episode: Episode) -> str:
        """What a teacher says: often careless as a solver, and as careless as a checker."""
        careless = episode.random.random() < self._careless
        if agent.name == "solver":
            return str(episode.random.randrange(19)) if careless else episode.prompt.answer
        if careless:
            return episode.random.choice((RIGHT, WRONG))
        solved = episode.agents["solver"].responses[-1].text.strip() == episode.prompt.answer
        return RIGHT if solved else WRONG
