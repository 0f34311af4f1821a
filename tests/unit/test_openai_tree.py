"""A client that drops thoughts, edits, goes back or asks at once: a tree of turns in which each response is trained once, as sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.engines.types import Sampling
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds, Episode, Rewards
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.openai_endpoint.session import Session
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.evaluation import measure
from asyncmoe.rollout.scoring import Sample, Score
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rollout.workers.worker import summed_up
from asyncmoe.trajectory import Trajectory, validate
from tests.unit.example_counts import examples
from tests.unit.openai_policy import IM_END
from tests.unit.test_openai_conversation import ask, user
from tests.unit.turn_trees import RandomPool, Request, check_requests

Client = Callable[[Session], Awaitable[Rewards]]


class Driven:
    """An environment that a client drives."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def run(self, episode: Episode) -> Rewards:
        return await self.client(Session(episode))


class Length:
    """Scores a response by its length, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Sample] = []

    async def score(self, sample: Sample) -> Score:
        self.asked.append(sample)
        return Score(float(len(sample.response)), why=sample.agent)

    async def close(self) -> None:
        pass


def play(
    known: Tokenizer, client: Client, seed: int = 0, bounds: Bounds | None = None
) -> tuple[tuple[Trajectory, ...], list[Request], Length]:
    pool = RandomPool(known.encode("abcdefghij "), IM_END, Random(seed))
    scorer = Length()
    sampling = Sampling(0.7, 100, (IM_END,), top_p=0.9)
    stage = RolloutContext(pool, sampling, known, scorer, Driven(client), bounds or Bounds(50, 1 << 20, 50, 50))  # type: ignore[arg-type]
    made = asyncio.run(episode.run(stage, Prompt("1+1=", known.encode("1+1="), "2"), EpisodeId(0, 0, 0)))
    for t in made:
        validate(t)
    check_requests(made, pool.requests)
    return made, pool.requests, scorer


def places(made: tuple[Trajectory, ...]) -> list[tuple[int, int, int, int]]:
    return [(t.agent, t.branch, t.parent, t.forked) for t in made]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8), st.integers(0, 1 << 30))
def test_whatever_a_client_does_with_history_each_response_is_trained_once(known: Tokenizer, steps: list[Any], seed: int) -> None:
    async def client(session: Session) -> float:
        histories: list[list[dict[str, Any]]] = []

        async def go_on(messages: list[dict[str, Any]]) -> None:
            answer, _ = await ask(session, messages)
            histories.append([*messages, answer])

        for kind, which, at in steps:
            old = histories[which % len(histories)] if histories else [user("a"), user("b")]
            cut = old[: 2 * (at % (len(old) // 2)) + 2]
            if kind == 0 or not histories:
                await go_on([user(f"begin {at % 3}")])
            elif kind == 1:
                await go_on([*old, user("more")])
            elif kind == 2:
                await go_on([*cut, user(f"again {at % 2}")])
            elif kind == 3:
                await go_on([*cut[:-1], {**cut[-1], "content": cut[-1]["content"][1:]}, user("edited")])
            elif kind == 4:
                await asyncio.gather(go_on([*old, user("one")]), go_on([*old, user("one")]), go_on([*old, user("two")]))
            else:
                await go_on(cut[:-1])
        return 1.0

    made, requests, _ = play(known, client, seed)
    assert len(requests) == sum(3 if kind == 4 and i else 1 for i, (kind, _, _) in enumerate(steps))
    assert len({t.agent for t in made}) <= 3
    assert {t.reward for t in made} == {1.0}


def test_going_back_shares_what_was_sampled_and_dropped_thoughts_are_new_context(known: Tokenizer) -> None:
    async def client(session: Session) -> None:
        first, _ = await ask(session, [user("a")])
        second, _ = await ask(session, [user("a"), first, user("b")])
        await ask(session, [user("a"), first, user("c")])
        shorter = {**second, "content": second["content"][1:]}
        await ask(session, [user("a"), first, user("b"), shorter, user("d")])
        await ask(session, [user("a"), {**first, "content": "?"}, user("e")])
        await ask(session, [user("another agent")])

    made, requests, scorer = play(known, client)
    shared = len(requests[0].asked + requests[0].said)
    assert places(made) == [(0, 0, 0, 0), (0, 1, 0, shared), (0, 2, 0, shared), (0, 3, 0, 0), (1, 0, 0, 0)]
    for later in requests[1:4]:
        assert later.asked[:shared] == requests[0].asked + requests[0].said
    assert [t.key for t in made] == ["g0.e0.a0.t0", "g0.e0.a0.b1.t0", "g0.e0.a0.b2.t0", "g0.e0.a0.b3.t0", "g0.e0.a1.t0"]
    # The tree is worth what its last response is worth, and only that is scored.
    assert [sample.agent for sample in scorer.asked] == ["policy/4", "policy/5"]
    assert {t.reward for t in made if t.agent == 0} == {float(len(known.decode(requests[4].said)))}


def test_paths_are_rewarded_by_name_or_as_their_tree(known: Tokenizer) -> None:
    async def branches(session: Session, rewards: dict[str, Any]) -> dict[str, Any]:
        first, answer = await ask(session, [user("a")])
        both = await asyncio.gather(*(ask(session, [user("a"), first, user("b")]) for _ in range(2)))
        assert (answer.path, sorted(one.path for _, one in both)) == ("policy", ["policy", "policy/2"])
        return rewards

    def rewards_of(rewards: dict[str, float]) -> list[float]:
        return [t.reward for t in play(known, lambda session: branches(session, rewards))[0]]

    assert rewards_of({"policy": 1.0}) == [1.0, 1.0]
    assert rewards_of({"policy": 1.0, "policy/2": 0.0}) == [1.0, 0.0]
    named = {"policy": 1.0, "policy/2": {"reward": 0.0, "metrics": {"turns": 2}}}
    assert [t.metrics for t in play(known, lambda session: branches(session, named))[0]] == [{}, {"turns": 2.0}]
    for wrong in ({"policy/2": 1.0}, {"policy": 1.0, "policy/3": 1.0}, {}):
        with pytest.raises(TrajectoryRejected, match="rewards of"):
            rewards_of(wrong)


def test_an_episode_of_many_paths_counts_once_in_an_evaluation(known: Tokenizer) -> None:
    async def client(session: Session) -> dict[str, float]:
        first, _ = await ask(session, [user("a")])
        for words in "bcd":
            await ask(session, [user("a"), first, user(words)])
        await ask(session, [user("z")])
        return {"policy": 1.0, "policy/4": 0.0}

    made, _, _ = play(known, client)
    assert measure(1, [(0, tuple(map(summed_up, made)))], 1.0, 0).reward_mean == 0.5


def test_paths_are_bounded(known: Tokenizer) -> None:
    async def client(session: Session) -> None:
        for _ in range(3):
            await ask(session, [user("a")])

    assert places(play(known, client, bounds=Bounds(paths=3))[0]) == [(0, 0, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0)]
    with pytest.raises(TrajectoryRejected, match=r"environment\.max_paths = 2"):
        play(known, client, bounds=Bounds(paths=2))
