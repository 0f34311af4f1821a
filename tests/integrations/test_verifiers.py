"""Environments of verifiers 0.1 as a task and an agent: make test-integrations ONLY=verifiers"""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

try:
    OLD = version("verifiers").startswith("0.1.")
except PackageNotFoundError:
    OLD = False
if not OLD:
    pytest.skip("run: make test-integrations ONLY=verifiers", allow_module_level=True)

from asyncmoe.config import parse
from asyncmoe.errors import AsyncmoeError, TrajectoryRejected
from asyncmoe.rollout import tasks
from asyncmoe.rollout.adapters import verifiers as adapter
from asyncmoe.rollout.episodes.environment import Bounds
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.integrations.endpoint import call, in_turn, one_conversation, served
from tests.unit.openai_policy import Policy

ENVIRONMENT = "tests.integrations.doubling"
KIND = "asyncmoe.rollout.adapters.verifiers:Examples"


def config(**options: object) -> Any:
    environment = {"kind": "openai", "agent": "asyncmoe.rollout.adapters.verifiers:rollout"}
    task = {"kind": KIND, "options": {"environment": ENVIRONMENT, **options}}
    return parse({"run": {"dir": "run", "steps": 1}, "model": {"path": "model"}, "task": task, "environment": environment})


def played(policy: Policy, known: Tokenizer, columns: Any) -> float:
    rewards = []

    async def client(url: str, key: str) -> None:
        rewards.append(await adapter.rollout(url, key, "", "", columns))

    served(policy, known, client)
    return rewards[0]


def test_examples_are_a_task(known: Tokenizer) -> None:
    task = tasks.load(config(), known).training
    prompts = [task.prompt(n) for n in range(3)]
    assert {(prompt.text, prompt.answer) for prompt in prompts} == {(f"twice {n}?", str(2 * n)) for n in (21, 22, 23)}
    assert [message["role"] for message in prompts[0].messages] == ["system", "user"]
    assert len(tasks.load(config(split="eval"), known).training.prompt(0).text) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arguments": {"group": True}}, "got rewards of whole groups"),
        ({"split": "test"}, "the option split: got 'test', expected train or eval"),
        ({"limit": 9}, "the option limit: got 9, expected at most 3"),
        ({"environment": "no_such_environment"}, "no_such_environment"),
        ({"arguments": {"counts": 3}}, "counts"),
    ],
)
def test_what_cannot_be_trained_is_refused(known: Tokenizer, options: dict[str, Any], said: str) -> None:
    with pytest.raises(AsyncmoeError, match=said) as caught:
        tasks.load(config(**options), known)
    assert "\n" not in str(caught.value)


def test_a_rollout_with_tools_is_one_trajectory(known: Tokenizer) -> None:
    columns = adapter.Examples(ENVIRONMENT)[0].columns
    policy = in_turn(known, "let me see " + call("double", '{"x": 21}'), "it is 42")
    assert played(policy, known, columns) == 1
    one_conversation(policy, known)
    assert "<|im_start|>tool\n42" in known.decode_all(policy.asked[1][1])


def test_each_example_is_scored_by_its_own_answer(known: Tokenizer) -> None:
    examples = adapter.Examples(ENVIRONMENT, {"tools": False})
    assert [played(in_turn(known, "it is 44"), known, examples[n].columns) for n in range(3)] == [0, 1, 0]


def test_an_empty_response_is_scored_as_the_policys_own(known: Tokenizer) -> None:
    assert played(in_turn(known, ""), known, adapter.Examples(ENVIRONMENT)[0].columns) == 0


def test_a_rollout_that_fails_says_why(known: Tokenizer) -> None:
    async def client(url: str, key: str) -> None:
        with pytest.raises(RuntimeError, match=r"doubling, example 0: .*episode_too_long"):
            await adapter.rollout(url, key, "", "", adapter.Examples(ENVIRONMENT)[0].columns)

    served(in_turn(known, "it is 42"), known, client, bounds=Bounds(tokens=5))


@pytest.mark.parametrize("raising", ["rubric", "group"])
@pytest.mark.parametrize("tools", [True, False])
def test_a_reward_function_that_raises_rejects_the_rollout(known: Tokenizer, raising: str, tools: bool) -> None:
    """verifiers logs it and counts 0."""
    examples = adapter.Examples(ENVIRONMENT, {"tools": tools, "raising": raising})
    assert played(in_turn(known, "it is 42"), known, examples[0].columns) == 1

    async def client(url: str, key: str) -> None:
        said = "scorer_error: .*doubling, example 1: the reward function broken raised ValueError: the judge is away"
        with pytest.raises(TrajectoryRejected, match=said):
            await adapter.rollout(url, key, "", "", examples[1].columns)

    served(in_turn(known, "it is 44"), known, client)
    assert played(in_turn(known, ""), known, examples[1].columns) == 0


def test_a_metric_that_raises_changes_nothing(known: Tokenizer) -> None:
    examples = adapter.Examples(ENVIRONMENT, {"raising": "metric"})
    assert played(in_turn(known, "it is 44"), known, examples[1].columns) == 1


def test_a_rollout_that_is_cancelled_ends_its_request(known: Tokenizer) -> None:
    policy = Policy(lambda seen: ())

    async def client(url: str, key: str) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(adapter.rollout(url, key, "", "", adapter.Examples(ENVIRONMENT)[0].columns), 3)
        for _ in range(50):
            await asyncio.sleep(0.1)
            if policy.cancelled:
                break

    served(policy, known, client)
    assert (policy.hanging, policy.cancelled) == (1, 1)
