"""Two agents with one policy: a solver answers the question, a checker judges the answer.

Both conversations of an episode become trajectories, which are accepted or rejected together. Each agent has its own reward, which is
compared with the same agent's rewards in the other episodes of the group.
"""

from __future__ import annotations

from asyncmoe.rollout.episodes.environment import Agent, Episode

RIGHT, WRONG = "y", "n"


class SolverAndChecker:
    """The solver sees the question; the checker sees the question and the solver's answer.

    Args:
        careless: share of the warm-up's demonstrations, 0 to 1, in which the teacher answers at random.
    """

    def __init__(self, careless: float = 0.0) -> None:
        self._careless = careless

    async def run(self, episode: Episode) -> dict[str, float]:
        """Reward the solver for the right answer and the checker for the right verdict."""
        solver, checker = episode.agent("solver"), episode.agent("checker")
        solver.see(episode.prompt.tokens)
        answer = (await solver.respond()).text.strip()
        checker.see(f"{episode.prompt.text}{answer}?")
        verdict = (await checker.respond()).text.strip()
        solved = answer == episode.prompt.answer
        return {"solver": float(solved), "checker": float(verdict == (RIGHT if solved else WRONG))}

    def demonstrate(self, agent: Agent, episode: Episode) -> str:
        """The teacher's response; it is equally careless as solver and as checker."""
        careless = episode.random.random() < self._careless
        if agent.name == "solver":
            return str(episode.random.randrange(19)) if careless else episode.prompt.answer
        if careless:
            return episode.random.choice((RIGHT, WRONG))
        solved = episode.agents["solver"].responses[-1].text.strip() == episode.prompt.answer
        return RIGHT if solved else WRONG
