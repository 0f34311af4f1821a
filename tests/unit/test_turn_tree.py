"""In any tree of turns, every response is trained on once, with the mean of its paths' advantages."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.engines.types import Sampling
from asyncmoe.errors import InvariantBroken, TrajectoryRejected
from asyncmoe.queue.group_buffer import describe, pack
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Agent, Bounds, Episode
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trainer.data import batch, trees
from asyncmoe.trainer.data.credit import outcome_advantages, relatives, token_advantages
from asyncmoe.trainer.data.schedule import BatchGrid
from asyncmoe.trainer.losses import PolicyLoss
from asyncmoe.trajectory import Trajectory, decode, encode, validate
from tests.unit.example_counts import examples
from tests.unit.turn_trees import Grown, RandomPool, Request, Step, check_requests

VOCABULARY = 50


@dataclass
class Played:
    environment: Grown
    trajectories: tuple[Trajectory, ...]
    requests: list[Request]


def play(known: Tokenizer, environment: Any, place: EpisodeId, seed: int) -> tuple[tuple[Trajectory, ...], list[Request]]:
    pool = RandomPool(range(20, VOCABULARY), 2, Random(seed))
    stage = RolloutContext(pool, Sampling(1.0, 8, (2,)), known, Exact(), environment, Bounds(20, 10000, 20, 20))  # type: ignore[arg-type]
    return asyncio.run(episode.run(stage, Prompt("1+1=", (5, 6), "2"), place)), pool.requests


def grow(known: Tokenizer, random: Random, scored: bool, place: EpisodeId) -> Played:
    steps = [
        Step(random.randrange(20), random.choice([None, random.randrange(9)]), random.random() < 0.15, random.choice([0.0, 0.5, 2.0]))
        for _ in range(random.randint(1, 9))
    ]
    whole = random.choice([0.0, 1.0])
    environment = Grown(steps, [random.choice([0.0, 0.25, 1.0]) if scored else whole for _ in range(20)])
    return Played(environment, *play(known, environment, place, random.randrange(1 << 30)))


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1 << 30))
def test_every_response_is_trained_once_in_tokens_as_sampled(known: Tokenizer, seed: int) -> None:
    played = grow(known, Random(seed), True, EpisodeId(3, 1, 0))
    check_requests(played.trajectories, played.requests)
    paths = played.environment.paths
    for t in played.trajectories:
        validate(t, newest_version=1)
        assert [getattr(decode(encode(t)), name) for name in ("branch", "parent", "forked", "key")] == [t.branch, t.parent, t.forked, t.key]
    by_name = dict(zip(played.environment.scored, played.trajectories, strict=True))
    assert set(by_name) == {name for name in paths if not any(begins(paths[name], other) for other in paths.values())}
    for agent in {t.agent for t in played.trajectories}:
        names = [name for name, t in by_name.items() if t.agent == agent]
        common = trees.shared([describe(by_name[name]) for name in names])
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                both = [a for a, b in zip(paths[one], paths[other], strict=False) if a == b]
                assert common[i, j] == (len(played.requests[both[-1]].asked + played.requests[both[-1]].said) if both else 0)
    pack(played.trajectories)


def begins(path: Sequence[int], other: Sequence[int]) -> bool:
    return len(path) < len(other) and list(other[: len(path)]) == list(path)


class Model(torch.nn.Module):
    """A causal policy of a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY + 20, 6, generator=generator, dtype=torch.float64))
        self.head = torch.nn.Parameter(torch.randn(6, VOCABULARY + 20, generator=generator, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probability of each token after the first: float64[T - 1]."""
        seen = torch.tanh(self.embedding[tokens[:-1]].cumsum(0))
        return (seen @ self.head).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, list(self.parameters()))])


def scaled(value: float, values: Sequence[float]) -> float:
    return 0.0 if len(set(values)) < 2 else (value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)


def naive(model: Model, groups: Sequence[Sequence[Played]], process: float, aggregation: str) -> torch.Tensor:
    """The loss over all leaves, each run through the model as a whole, with every leaf's own advantages; a response that n leaves share
    weighs 1 / n in each of them."""
    trees_of = [
        (group, number, episode_, [name for name in episode_.environment.scored if name.split("/")[0] == root])
        for group in groups
        for episode_ in group
        for number, root in enumerate(name for name in episode_.environment.paths if "/" not in name)
    ]
    total = sum(len(request.said) for group in groups for one in group for request in one.requests)
    loss = torch.zeros([], dtype=torch.float64)
    for group, number, played, leaves in trees_of:
        peers = [(other, names) for same, n, other, names in trees_of if same is group and n == number]
        worths = [statistics.fmean(other.environment.scored[name] for name in names) for other, names in peers]
        credits = [
            other.environment.steps[s].credit for other, names in peers for s in {s for n in names for s in other.environment.paths[n]}
        ]
        own = [played.environment.scored[name] for name in leaves]
        steps = [s for name in leaves for s in played.environment.paths[name]]
        size = sum(len(played.requests[s].said) for s in set(steps))
        weight = 1 / total if aggregation == "token_mean" else 1 / (len(trees_of) * size)
        for name, reward in zip(leaves, own, strict=True):
            path = played.environment.paths[name]
            last = played.requests[path[-1]]
            logprobs = model(torch.tensor(last.asked + last.said))
            advantage = scaled(statistics.fmean(own), worths) + scaled(reward, own)
            for place, s in enumerate(path):
                request = played.requests[s]
                along = sum(scaled(played.environment.steps[after].credit, credits) for after in path[place:])
                part = logprobs[len(request.asked) - 1 : len(request.asked) + len(request.said) - 1]
                loss = loss - weight / steps.count(s) * (advantage + process * along) * part.sum()
    return loss


@pytest.fixture(scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.booleans(),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_the_gradient_is_that_of_the_loss_over_all_leaves(
    known: Tokenizer, seed: int, scored: bool, process: float, aggregation: str
) -> None:
    random, model = Random(seed), Model()
    groups = [[grow(known, random, scored, EpisodeId(group, number, 0)) for number in range(3)] for group in range(2)]
    every = [with_logprobs(t, model) for group in groups for played in group for t in played.trajectories]
    items = [describe(t) for t in every]
    section = ObjectiveSection.model_validate({"process": {"weight": process}, "aggregation": aggregation})
    loss = torch.zeros([], dtype=torch.float64)
    weights = trees.token_weights(items, section.aggregation, 8)
    for mine in (range(0, len(every), 2), range(1, len(every), 2)):  # two ranks
        own, others = {i: every[i] for i in mine}, {i: every[i] for i in relatives(items, mine, section)}
        advantages = token_advantages(items, own, section, outcome_advantages(items, section)[0], others)
        made = batch.pack(own, list(mine), advantages=advantages, weights=weights, grid=BatchGrid(), packed=True)
        logprobs = torch.zeros(made.rows, dtype=torch.float64)
        for _, first, count in made.places:
            logprobs[first : first + count - 1] = model(made.tokens[0, first : first + count])
        loss = loss + PolicyLoss(section, 1.0, 1)(logprobs, made, None)[0]
    got, want = model.gradient(loss), model.gradient(naive(model, groups, process, aggregation))
    assert float((got - want).norm()) <= 2e-5 * max(float(want.norm()), 1e-2)


def with_logprobs(t: Trajectory, model: Model) -> Trajectory:
    with torch.no_grad():
        made = np.concatenate([[0.0], model(torch.from_numpy(t.tokens).long()).numpy()])
    return replace(t, logprobs=np.where(t.loss_mask, made, 0).astype(np.float32))


async def begun(made: Episode) -> Agent:
    made.agent().see([5, 6])
    await made.agent().respond()
    return made.agent()


def credited(known: Tokenizer, of_fork: bool) -> tuple[tuple[Trajectory, ...], list[Request]]:
    """A shared response is rewarded as the latest one of a path that another continues, or of a path that shares it."""

    async def run(made: Episode) -> float:
        agent = await begun(made)
        forks = [made.fork(agent), made.fork(agent)]
        (forks[1] if of_fork else agent).credit(3.0)
        for fork in forks:
            fork.see([7])
            await fork.respond()
        return 1.0

    return play(known, SimpleNamespace(run=run), EpisodeId(0, 0, 0), 0)


@pytest.mark.parametrize("of_fork", [True, False])
def test_the_reward_of_a_shared_step_is_never_lost(known: Tokenizer, of_fork: bool) -> None:
    made, requests = credited(known, of_fork)
    check_requests(made, requests)
    first, second = made
    assert (first.branch, second.branch, second.parent) == (1, 2, 1)
    assert first.rewards[second.forked - 1] == 3.0
    assert [int((~np.isnan(t.rewards)).sum()) for t in made if t.rewards is not None] == [1, 0]


def test_a_trajectory_that_trains_what_its_parent_trains_is_rejected(known: Tokenizer) -> None:
    made, _ = credited(known, True)
    for wrong in ({"loss_mask": made[0].loss_mask, "versions": made[0].versions}, {"forked": 10**6}, {"parent": 5}):
        with pytest.raises(TrajectoryRejected, match=r"bad_fork|length_mismatch"):
            validate(replace(made[1], **wrong))  # type: ignore[arg-type]
    orphan = [describe(made[1])]
    with pytest.raises(InvariantBroken, match="does not come before it"):
        trees.shared(orphan)


def test_forks_and_rewards_of_paths_that_are_not_there_are_refused(known: Tokenizer) -> None:
    async def late(made: Episode) -> float:
        made.fork(await begun(made), 2)
        return 1.0

    async def of_no_leaf(made: Episode) -> dict[str, float]:
        second = made.fork(await begun(made))
        second.see([8])
        await second.respond()
        return {"policy": 1.0, "policy/3": 0.0}

    for run in (late, of_no_leaf):
        with pytest.raises(TrajectoryRejected, match="environment_error"):
            play(known, SimpleNamespace(run=run), EpisodeId(0, 0, 0), 0)
