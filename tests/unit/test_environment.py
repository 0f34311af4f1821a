"""Rights of an environment, and the outcome of an episode with an error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial, partialmethod
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from asyncmoe import plugins
from asyncmoe.config.scoring import ScoringSection
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.types import Sampling, VersionSpan
from asyncmoe.errors import InvariantBroken, StorageError, TrajectoryRejected
from asyncmoe.rollout import parts
from asyncmoe.rollout.episodes import environments, episode
from asyncmoe.rollout.episodes.environment import Agent, Bounds, Episode
from asyncmoe.rollout.episodes.environments.single_turn import SingleTurn
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.episodes.episode import RolloutContext, Teaching
from asyncmoe.rollout.episodes.openai_endpoint.environment import OpenAIEnvironment
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring import Scorer, plugin
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.scoring.limits import LimitedScorer
from asyncmoe.rollout.scoring.parse_score import read
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import NOT_SAMPLED, Recording, Trajectory, validate
from tests.configs import minimal
from tests.unit.generations import generation_of

BOUNDS = Bounds(turns=4, tokens=64, agents=3)


class Echo:
    """A pool whose engines respond with the last `size` tokens of the prompt."""

    lost_tokens = recomputed_tokens = 0

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, **_: object) -> PooledGeneration:
        self.asked.append(tuple(tokens))
        await asyncio.sleep(0)
        said = tuple(tokens[-min(self.size, sampling.max_new_tokens) :])
        version = str(len(self.asked))
        return PooledGeneration(generation_of(said, (-0.5,) * len(said), (VersionSpan(version, 0, len(said)),), "stop", 0), 1)


Run = Callable[[Episode], Awaitable[Any]]


def play(run: Run, known: Tokenizer, pool: Any = None) -> tuple[Trajectory, ...]:
    environment: Any = SimpleNamespace(run=run)
    stage = RolloutContext(pool or Echo(), Sampling(1.0, 8, (2,)), known, Exact(), environment, BOUNDS, 5.0, seed=3)
    return asyncio.run(episode.run(stage, Prompt("1+1=", known.encode("1+1="), "+1="), EpisodeId(5, 2, 1)))


def reason(run: Run, known: Tokenizer) -> str:
    with pytest.raises(TrajectoryRejected) as refused:
        play(run, known)
    return refused.value.reason


def credited(*rewards: Any) -> Run:
    """A step for each reward; None: no reward."""

    async def run(made: Episode) -> float:
        for reward in rewards:
            made.agent().see("1+1=")
            await made.agent().respond()
            if reward is not None:
                made.agent().credit(reward)
        return 1.0

    return run


class Tool:
    """Two responses, an observation between them."""

    async def run(self, made: Episode) -> float:
        agent = made.agent()
        agent.see(made.prompt.tokens)
        assert (await agent.respond()).text == "+1="
        agent.see("<2>")
        await agent.respond()
        agent.see("a last observation that nobody answers")
        return 0.5


@pytest.mark.parametrize(("most", "arguments", "tokens"), [(None, [], 64), (None, ["--context-length", "32"], 32), (9, [], 9)])
def test_a_conversation_fits_the_context_of_model_and_engines(most: int | None, arguments: list[str], tokens: int) -> None:
    config = minimal(environment={"max_tokens": most}, engines={"args": arguments})
    assert environments.bounds(config, cast("Tokenizer", SimpleNamespace(positions=64))).tokens == tokens


def test_what_was_sampled_is_never_encoded_again_and_what_was_given_is_not_trained(known: Tokenizer) -> None:
    pool = Echo()
    (made,) = play(Tool().run, known, pool)
    assert tuple(made.tokens) == known.encode("1+1=+1=<2><2>")
    assert pool.asked == [known.encode("1+1="), known.encode("1+1=+1=<2>")]
    assert made.loss_mask.tolist() == [False] * 4 + [True] * 3 + [False] * 3 + [True] * 3
    assert made.versions.tolist() == [NOT_SAMPLED] * 4 + [1] * 3 + [NOT_SAMPLED] * 3 + [2] * 3
    assert (made.key, made.reward, made.agent) == ("g5.e2.a0.t1", 0.5, 0)
    validate(made, Recording(vocabulary=known.vocabulary))


class Two:
    """Two agents and a silent one; only the first hears the prompt."""

    def __init__(self, rewards: Any) -> None:
        self.rewards = rewards

    async def run(self, made: Episode) -> Any:
        solver, checker, silent = (made.agent(name) for name in ("solver", "checker", "silent"))
        solver.see(made.prompt.tokens)
        checker.see("right?")
        silent.see("never asked")
        await asyncio.gather(solver.respond(), checker.respond())
        return self.rewards


def test_every_agent_that_spoke_becomes_a_trajectory_of_its_own(known: Tokenizer) -> None:
    solver, checker = play(Two({"solver": 1.0, "checker": -1.0}).run, known)
    assert [(t.key, t.agent, t.reward) for t in (solver, checker)] == [("g5.e2.a0.t1", 0, 1.0), ("g5.e2.a1.t1", 1, -1.0)]
    assert [known.decode(t.tokens.tolist()) for t in (solver, checker)] == ["1+1=+1=", "right?ht?"]
    assert {t.reward for t in play(Two(0.25).run, known)} == {0.25}
    # The configured scorer: the solver's response is the answer.
    assert [t.reward for t in play(Two(None).run, known)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("result", "rewards", "metrics"),
    [
        ({"reward": 0.5, "metrics": {"turns": np.float32(2)}}, [0.5, 0.5], [{"turns": 2.0}] * 2),
        ({"reward": 0.5}, [0.5, 0.5], [{}] * 2),
        # The configured scorer: the solver's response is the answer.
        ({"metrics": {"turns": 2}}, [1.0, 0.0], [{"turns": 2.0}] * 2),
        ({"solver": {"reward": 1, "metrics": {"tries": 3}}, "checker": -1.0}, [1.0, -1.0], [{"tries": 3.0}, {}]),
        ({"solver": {"metrics": {"tries": 3}}, "checker": None}, [1.0, 0.0], [{"tries": 3.0}, {}]),
    ],
)
def test_an_environment_returns_metrics_beside_the_reward(result: Any, rewards: Any, metrics: Any, known: Tokenizer) -> None:
    made = play(Two(result).run, known)
    assert ([t.reward for t in made], [t.metrics for t in made]) == (rewards, metrics)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"reward": 0.5, "metrics": {"turns": "2"}}, "bad_reward"),
        ({"reward": 0.5, "metrics": {"turns": float("inf")}}, "bad_reward"),
        ({"reward": 0.5, "metrics": dict.fromkeys(map("m{}".format, range(10_000)), 1.0)}, "bad_reward"),
        ({"reward": 0.5, "turns": 2}, "environment_error"),
        ({"solver": {"reward": 1.0}, "checker": {"metrics": {"tries": 3}}}, "bad_reward"),
        ({"solver": 1.0}, "environment_error"),
        ({"solver": 1.0, "checker": 0.0, "silent": 0.0}, "environment_error"),
        ({"solver": 1.0, "checker": "1"}, "bad_reward"),
    ],
)
def test_rewards_of_other_agents_and_what_is_no_number_are_refused(rewards: Any, expected: str, known: Tokenizer) -> None:
    assert reason(Two(rewards).run, known) == expected


def heard(made: Episode) -> Agent:
    made.agent().see("x")
    return made.agent()


async def twice_at_once(made: Episode) -> None:
    await asyncio.gather(heard(made).respond(), made.agent().respond())


async def sees_while_it_speaks(made: Episode) -> None:
    speaking = asyncio.create_task(heard(made).respond())
    await asyncio.sleep(0)
    try:
        made.agent().see("y")
    finally:
        await speaking


async def without_end(made: Episode) -> None:
    while True:
        await heard(made).respond()


async def flood(made: Episode) -> None:
    made.agent().see("x" * 1000)
    await made.agent().respond()


async def crowd(made: Episode) -> None:
    for number in range(100):
        made.agent(str(number))


async def leaves_early(made: Episode) -> None:
    asyncio.get_running_loop().create_task(heard(made).respond())
    await asyncio.sleep(0)


async def credits_before(made: Episode) -> None:
    heard(made).credit(1.0)


async def only_hears(made: Episode) -> None:
    heard(made)


@pytest.mark.parametrize(
    ("misuse", "expected"),
    [
        (lambda made: made.agent().respond(), "environment_error"),
        (lambda made: heard(made).respond(max_new_tokens=0), "environment_error"),
        (twice_at_once, "environment_error"),
        (sees_while_it_speaks, "environment_error"),
        (leaves_early, "environment_error"),
        (credits_before, "environment_error"),
        (without_end, "episode_too_long"),
        (flood, "episode_too_long"),
        (crowd, "episode_too_long"),
        (only_hears, "empty_response"),
    ],
)
def test_an_environment_cannot_hide_that_an_agent_failed(misuse: Any, expected: str, known: Tokenizer) -> None:
    async def run(made: Episode) -> float:
        with suppress(TrajectoryRejected):
            await misuse(made)
        return 1.0

    assert reason(run, known) == expected


@pytest.mark.parametrize("what", [np.array([30]), torch.tensor([30]), [np.int64(30)], range(30, 31)])
def test_tokens_of_any_kind_are_seen_after_others(what: Any, known: Tokenizer) -> None:
    async def run(made: Episode) -> float:
        for given in ([5], what, "half \ud800"):
            made.agent().see(given)
        assert made.agent().tokens == (5, 30, *known.encode("half \N{REPLACEMENT CHARACTER}"))
        await made.agent().respond()
        return 1.0

    assert play(run, known)[0].reward == 1.0


@pytest.mark.parametrize("what", [[1.0], np.array([1.0]), torch.tensor(3), [[1]], 1, None, [-1], [1 << 32]])
def test_what_is_no_token_is_not_seen(what: Any, known: Tokenizer) -> None:
    async def run(made: Episode) -> float:
        with suppress(TrajectoryRejected):
            made.agent().see(what)
        assert len(made.agent().tokens) == len(made.agent().answered)
        return 1.0

    assert reason(run, known) in ("environment_error", "token_out_of_vocabulary")


def test_a_response_fits_into_what_is_left_of_the_conversation(known: Tokenizer) -> None:
    async def run(made: Episode) -> float:
        made.agent().see("x" * 62)
        await made.agent().respond()
        return 0.0

    (made,) = play(run, known, Echo(8))
    assert len(made) == BOUNDS.tokens


class Draws:
    """An environment with chance in it, and a teacher."""

    async def run(self, made: Episode) -> float:
        for given in (f"{made.random.randrange(10**6)};", "then "):
            made.agent().see(given)
            await made.agent().respond()
        return 1.0

    def demonstrate(self, agent: Agent, made: Episode) -> str:
        assert agent.text.endswith("then " if agent.turns else ";")
        return f"turn {len(agent.turns)}"


def test_chance_depends_on_the_seed_and_the_place_alone(known: Tokenizer) -> None:
    (made,) = play(Draws().run, known)
    expected = Random("3 episode 5 2 1").randrange(10**6)
    assert known.decode(made.tokens.tolist()).startswith(f"{expected};")


def test_a_teacher_goes_through_the_same_environment(known: Tokenizer) -> None:
    teaching = Teaching(Draws(), known, BOUNDS, seed=3)
    (shown,) = asyncio.run(teaching.episode(4, Prompt("", (), "")))
    said = shown.tokens[shown.loss_mask].tolist()
    assert said == [*known.encode("turn 0"), known.eos, *known.encode("turn 1"), known.eos]
    assert "then " in known.decode(shown.tokens.tolist())
    assert (shown.key, shown.group, shown.finish, shown.prefix_version) == ("d4.a0", 4, "stop", NOT_SAMPLED)
    validate(shown, Recording(vocabulary=known.vocabulary))


def test_what_an_environment_makes_of_a_failed_disk_does_not_hide_it(known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "generate", partial(does, StorageError("no space")))

    async def run(made: Episode) -> None:
        with suppress(StorageError):
            await credited(0.5)(made)
        raise KeyError("mine")

    with pytest.raises(StorageError, match="no space"):
        play(run, known)


def test_rewards_of_steps_stand_at_their_last_tokens(known: Tokenizer) -> None:
    (made,) = play(credited(0.5, None, 0.0), known)
    validate(made, Recording(rewards=True))
    turn = len(known.encode("1+1=")) + 3
    assert {at: r for at, r in enumerate(made.rewards.tolist()) if r == r} == {turn - 1: 0.5, 3 * turn - 1: 0.0}
    assert play(credited(None), known)[0].rewards is None


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "0.5", [1.0]])
def test_a_step_reward_that_is_no_number_rejects_the_episode(known: Tokenizer, reward: Any) -> None:
    assert reason(credited(1.0, reward), known) == "bad_reward"


# ---------------------------------------------------------------- users' code of every kind


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Interrupts:
    """An answer that cannot be read."""

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt

    __float__ = __repr__ = __iter__ = partialmethod(__getattr__, "")


async def does(what: Any, *_: object, **__: object) -> object:
    """Misbehave, or return something."""
    match what:
        case "cancels its task":
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(9)
        case "exits in a task":
            await asyncio.gather(does(SystemExit(4)), asyncio.sleep(0))
        case "is deaf":
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(9)
        case BaseException():
            raise what
    return what


def stage(kind: str, act: Any, known: Tokenizer, limit_s: float) -> Any:
    """Return what an episode runs with in which a user's code of a kind acts, for at most `limit_s`."""

    async def run(made: Episode) -> object:
        made.agent().see("1")
        await made.agent().respond()
        return await act()

    judge, section = plugin.AsyncScorer(act, act, None, limit_s), ScoringSection(timeout_s=limit_s, deadline_s=60.0, retries=0)
    scorer: Scorer = LimitedScorer("it", judge, partial(read, separator=None, decode=str), 4, section)
    environment: Any = SingleTurn()
    match kind:
        case "environment":
            environment = SimpleNamespace(run=run, close=partial(does, SystemExit(5)))
        case "tool":
            environment = WithTools(["calculator"], "brackets", chat=False)
            environment.runners = {"act": Runner("act", "", {"properties": {"x": {}}}, act, ToolLimits(timeout_s=limit_s))}
            scorer = Exact()
        case "agent":
            environment = OpenAIEnvironment("asyncio:sleep")
            environment._function = act
    most_s = limit_s if kind in ("environment", "agent") else 60.0
    return RolloutContext(Echo(), Sampling(1.0, 8, (2,)), known, scorer, environment, Bounds(4, 512), most_s)  # type: ignore[arg-type]


RAISES = [KeyError("mine"), Wordless(), StopIteration(), asyncio.CancelledError(), SystemExit(4), GeneratorExit(), InvariantBroken("mine")]
BAD = [float("nan"), 10**5000, 1e39, b"1", [1.0], torch.zeros(2), Interrupts(), np.complex64(1), Decimal("sNaN"), {"long" * 9**6: 1.0}]
GOOD = [True, np.float32(1), np.array([0.5]), torch.tensor(0.5), Fraction(1, 2)]
REASONS = {"scorer": "scorer_(error|unavailable|garbage|nan)", "environment": "environment_error|bad_reward", "tool": r"tool_crash|0\.0"}
REASONS["agent"] = "environment_error|empty_response"


@pytest.mark.parametrize(
    "what",
    ["cancels its task", "exits in a task", "is deaf", *RAISES, *BAD, *GOOD],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
@pytest.mark.parametrize("kind", REASONS)
def test_what_a_users_code_does(kind: str, what: Any, known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_LEAVE_S", 0.1)
    found: list[str] = []

    async def main() -> None:
        made = stage(kind, partial(does, what), known, 0.3 if isinstance(what, str) and what == "is deaf" else 30.0)
        asked = Prompt("[1]", known.encode("[1]"), "")  # of which `Echo` makes a call of a tool
        for number in range(2):
            try:
                found.append(str((await episode.run(made, asked, EpisodeId(0, number, 0)))[0].reward))
            except TrajectoryRejected as rejected:
                found.append(rejected.reason if len(str(rejected)) < 2200 else "long")
        await plugin.close_own(made.environment, "it")

    parts.run(main())
    good = kind in ("scorer", "environment") and any(what is one for one in GOOD)
    wanted = str(float(np.ravel(what)[0])) if good else REASONS[kind]
    if isinstance(what, str) and what == "is deaf":
        wanted = {"agent": "environment_timeout", "tool": r"0\.0"}.get(kind, f"{kind}_timeout")
    assert [bool(re.fullmatch(wanted, one)) for one in found] == [True, True], found
