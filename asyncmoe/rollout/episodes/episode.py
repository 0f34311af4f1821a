"""One episode: an environment, its conversations, their scores, and the resulting trajectories.

The trajectories of an episode are accepted or rejected together: if an agent fails, the environment raises or takes too long, or scoring
fails, all are rejected with that reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import numpy as np

from asyncmoe import plugins
from asyncmoe.async_tasks import together
from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.scheduling import ScheduledRequest
from asyncmoe.engines.types import Generation, Listener, Sampling
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.log.turns import Turns
from asyncmoe.rollout.episodes import environment, turn_tree
from asyncmoe.rollout.episodes.environment import Agent, Bounds, Demonstrator, Environment, Episode, Outcome, Rewards
from asyncmoe.rollout.episodes.environments.single_turn import SingleTurn
from asyncmoe.rollout.episodes.interruption import respond
from asyncmoe.rollout.episodes.recall import Recall
from asyncmoe.rollout.episodes.trajectory_builder import FIRST, EpisodeId, PlaceInTree, Turn, assemble, sampled, step_rewards
from asyncmoe.rollout.scoring import Sample, Score, Scorer
from asyncmoe.rollout.scoring.plain_answer import finite, metrics_of
from asyncmoe.rollout.tasks import Demonstration, Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import NOT_SAMPLED, NOTHING, Trajectory

_TEACHING_S = 60.0
_OUTCOME = {"reward", "metrics"}
_LONG = 4096
"""Tokens of a conversation above which its trajectory is built in a thread: with routes and masks, this takes a millisecond or more."""


@dataclass(frozen=True)
class RolloutContext:
    """Everything that the episodes of a run share.

    Attributes:
        timeout_s: limit on the environment's run time, generation included.
        seed: seed of the run; together with `stream` and the episode's place, it seeds the environment's own random draws.
        stream: namespace of group numbers; the same number in two streams means two different prompts.
        opened: called with every episode that begins.
        turns: keeps the engines' answers for episodes that begin again after a restart; None: they are not kept.
        piece: maximum number of tokens of a request; 0: no limit.
        ahead: the episodes' first requests go before those of other episodes, as later requests always do.
        teacher: supplies `Score.teacher` of every path, or None.
    """

    pool: Pool
    sampling: Sampling
    tokenizer: Tokenizer
    scorer: Scorer
    environment: Environment = field(default_factory=SingleTurn)
    bounds: Bounds = field(default_factory=Bounds)
    timeout_s: float = 600.0
    interruption: Interruption = "in_place"
    seed: int = 0
    stream: str = "episode"
    opened: Callable[[Episode], None] | None = None
    turns: Turns | None = None
    piece: int = 0
    ahead: bool = False
    teacher: Scorer | None = None


async def run(stage: RolloutContext, prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
    """Run and score one episode.

    Returns:
        One trajectory per agent that responded, in the order in which the environment first requested the agents; for a forked agent, one
        per leaf of its tree.

    Raises:
        TrajectoryRejected: the environment raised ("environment_error") or took too long ("environment_timeout"), no agent responded
            ("empty_response"), an engine died or failed, scoring failed, or a record is invalid.
    """
    begin, answers = time.perf_counter(), None
    if stage.turns is not None:
        answers = Recall(stage.pool, stage.turns, place, resumes=stage.interruption == "abort_resume")

    async def speak(agent: Agent, given: tuple[int, ...], sampling: Sampling, listener: Listener | None) -> list[Turn]:
        prompt, running = f"{stage.stream} {place.group}", any(other.turns for other in made.agents.values())
        request = ScheduledRequest(prompt, continues=running or stage.ahead, conversation=f"{stage.stream} {place.key(agent.number)}")
        return await respond(stage.pool, given, agent.answered, sampling, stage.interruption, request, listener, answers, stage.piece)

    random = Random(f"{stage.seed} {stage.stream} {place.group} {place.episode} {place.attempt}")
    made = Episode(
        prompt, place, stage.tokenizer, random, stage.sampling, stage.bounds, speak, lambda *asked: stage.pool.parse_calls(*asked)
    )
    if stage.opened is not None:
        stage.opened(made)
    given, agents = await play(stage.environment, made, stage.timeout_s)
    if not agents:
        raise TrajectoryRejected("empty_response", f"{place.key()}: no agent responded")
    generated = time.perf_counter()
    scores = await _worth(stage, given, agents, prompt)
    seconds = {"generate": generated - begin, "score": time.perf_counter() - generated}
    record = partial(assemble, place=place, recording=stage.sampling.recording, seconds=seconds)
    trajectories = []
    for agent, path, score in zip(agents, _places(agents), scores, strict=True):
        credits, agent.why = _credits(agent, made.agents.values()), score.why
        rewards = step_rewards(credits, len(agent.answered)) if credits else score.rewards
        metrics = {**score.metrics, **agent.metrics}
        made_of = partial(record, agent.turns, reward=score.reward, path=path, teacher=score.teacher, rewards=rewards, metrics=metrics)
        # Routes of a long response are megabytes: assembling them here would delay other responses too long.
        trajectories.append(await asyncio.to_thread(made_of) if len(agent.answered) > _LONG else made_of())
    return tuple(trajectories)


async def play(environment_: Environment, made: Episode, timeout_s: float) -> tuple[list[float] | None, list[Agent]]:
    """Run the environment; return the reward of each agent (None: the scorer decides) and the agents that responded."""

    async def played() -> tuple[list[float] | None, list[Agent]]:
        result, agents = await environment_.run(made), made.spoke
        return None if result is None or not agents else _given(result, agents), agents

    try:
        return await plugins.awaited(played, timeout_s, "the environment")
    except Exception as error:
        made.check()
        if isinstance(error, TrajectoryRejected):
            raise
        late = isinstance(error, plugins.Overdue)
        raise TrajectoryRejected(environment.TIMEOUT if late else environment.ERROR, str(error) if late else plugins.told(error)) from error


def _places(agents: Sequence[Agent]) -> list[PlaceInTree]:
    """Return each path's place. Agents that were not forked from each other share no turns."""
    forks = turn_tree.forks([agent.turns for agent in agents])
    return [
        PlaceInTree(agent.number, agent.branch, agents[parent].branch if shared else 0, shared)
        for agent, (parent, shared) in zip(agents, forks, strict=True)
    ]


def _credits(path: Agent, agents: Iterable[Agent]) -> dict[int, float]:
    """Return the rewards of a path's steps: a shared response may have been rewarded as another path's latest one."""
    found: dict[int, float] = {}
    for agent in agents:
        size = sum(map(len, agent.turns[: turn_tree.common(agent.turns, path.turns)]))
        found |= {at: reward for at, reward in agent.credits.items() if at < size}
    return found | path.credits


async def _worth(stage: RolloutContext, given: list[float] | None, agents: list[Agent], prompt: Prompt) -> list[Score]:
    """Return one score per path. A teacher is asked even if the environment provides the rewards.

    Args:
        given: the environment's rewards, one per path; None: the scorer decides.
    """
    last = {agent.number: agent for agent in sorted(agents, key=lambda agent: agent.spoke_last)}
    steps = stage.sampling.recording.rewards  # step rewards need a score of every path
    scored = [agent for agent in agents if given is None and (steps or agent is last[agent.number])]
    asked = [stage.scorer.score(_sample(agent, prompt)) for agent in scored]
    if stage.teacher is not None:
        asked += [stage.teacher.score(_sample(agent, prompt)) for agent in agents]
    answers = await together(asked)
    if given is None:
        found = dict(zip((agent.name for agent in scored), answers, strict=False))
        # A tree gets the reward of its last response, with which the conversation ended.
        trees = [(agent.name, found[last[agent.number].name]) for agent in agents]
        scores = [replace(tree, rewards=found[name].rewards if name in found else None) for name, tree in trees]
    else:
        scores = [Score(reward) for reward in given]
    teachers = [one.teacher for one in answers[len(scored) :]] or [None] * len(agents)
    return [replace(score, teacher=teacher) for score, teacher in zip(scores, teachers, strict=True)]


def _sample(agent: Agent, prompt: Prompt) -> Sample:
    tokens, by_policy = tuple(agent.answered.tolist()), tuple(sampled(agent.turns).tolist())
    return Sample(prompt.text, agent.responses[-1].text, prompt.answer, tokens, by_policy, agent.name, prompt.columns)


def _given(result: Rewards, agents: list[Agent]) -> list[float] | None:
    """Return the environment's reward for each leaf (a trajectory): the path's own reward, or its tree's; None: the scorer decides.
    Note the metrics in `Agent.metrics`."""
    known = {name for agent in agents for name in (agent.name, agent.tree)}
    by_name = isinstance(result, Mapping) and not (_OUTCOME & set(result)) - known
    named: Mapping[str, Outcome] = result if isinstance(result, Mapping) and by_name else dict.fromkeys(known, result)
    if set(named) - known or any(agent.name not in named and agent.tree not in named for agent in agents):
        names = [agent.name for agent in agents]
        detail = f"rewards of {sorted(map(str, named))!s:.200}, expected a reward for each agent that spoke: {sorted(names)}"
        raise TrajectoryRejected(environment.ERROR, f"the environment returned {detail}; a path that another path continues gets no reward")
    rewards = []
    for agent in agents:
        reward, agent.metrics = _outcome(named.get(agent.name, named.get(agent.tree)))
        rewards.append(reward)
    return None if rewards.count(None) == len(rewards) else [_finite(reward) for reward in rewards]


def _outcome(value: Outcome) -> tuple[object, dict[str, float]]:
    """Return a reward, not yet checked, and the metrics beside it."""
    if not isinstance(value, Mapping):
        return value, {}
    if unknown := set(value) - _OUTCOME:
        detail = f"the key {min(map(str, unknown))}, expected only reward and metrics (other numbers by name)"
        raise TrajectoryRejected(environment.ERROR, f"the environment returned {detail}")
    try:
        return value.get("reward"), metrics_of(value.get("metrics", {}))
    except ValueError as error:
        raise TrajectoryRejected("bad_reward", f"the environment returned {error}") from error


def _finite(value: object) -> float:
    try:
        return finite(value)
    except ValueError as error:
        raise TrajectoryRejected("bad_reward", f"the environment returned the reward {error}, expected a finite number") from error


@dataclass(frozen=True)
class Teaching:
    """Runs an environment unchanged, with itself as the teacher in place of the engines."""

    environment: Demonstrator
    tokenizer: Tokenizer
    bounds: Bounds
    seed: int

    async def episode(self, index: int, prompt: Prompt) -> tuple[Trajectory, ...]:
        """Run episode number `index` of a warm-up.

        Raises:
            TrajectoryRejected: see `run`. Rewards are checked although only reinforcement learning uses them.
        """

        async def speak(agent: Agent, given: tuple[int, ...], sampling: Sampling, listener: Listener | None) -> list[Turn]:
            return [_taught(given, (*self.tokenizer.encode(self.environment.demonstrate(agent, made)), self.tokenizer.eos))]

        sampling = Sampling(1.0, self.bounds.tokens, (self.tokenizer.eos,))
        random = Random(f"{self.seed} demonstration {index}")
        made = Episode(prompt, EpisodeId(index, 0, 0), self.tokenizer, random, sampling, self.bounds, speak)
        _, agents = await play(self.environment, made, _TEACHING_S)
        return tuple(_shown(index, agent.turns, path) for agent, path in zip(agents, _places(agents), strict=True))


def demonstration(index: int, made: Demonstration) -> Trajectory:
    """Return a solved question as a trajectory that no version sampled."""
    return _shown(index, [_taught(made.given, made.said)])


def _taught(given: tuple[int, ...], said: tuple[int, ...]) -> Turn:
    return Turn(given, Generation(np.array(said, np.int32), np.zeros(len(said), np.float32), (), "stop", 0), NOT_SAMPLED)


def _shown(index: int, turns: Sequence[Turn], path: PlaceInTree = FIRST) -> Trajectory:
    name = f"d{index}.a{path.agent}" + (f".b{path.branch}" if path.branch else "")
    return replace(assemble(turns, EpisodeId(index, 0, 0), NOTHING, 0.0, {}, path), key=name)
