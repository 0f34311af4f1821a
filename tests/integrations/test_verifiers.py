"""Tasksets of verifiers 0.4, API `verifiers.v1`, as a task and an agent: make test-integrations ONLY=verifiers

Each rollout runs a program of its own, which uv gives an environment: the first takes a while.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("verifiers") is None:
    pytest.skip("run: make test-integrations ONLY=verifiers", allow_module_level=True)

from asyncmoe.errors import AsyncmoeError
from asyncmoe.rollout import tasks
from asyncmoe.rollout.adapters import verifiers as adapter
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.configs import minimal
from tests.integrations.endpoint import call, in_turn, one_conversation, rewarded
from tests.unit.openai_policy import Policy

HERE = Path(__file__).parent
AGENT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The taskset as an installed package, for its tool server's process too; uv, which runs the agent's program, beside Python."""
    import sys

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def played(policy: Policy, known: Tokenizer, columns: Any) -> float:
    return rewarded(policy, known, lambda url, key: adapter.rollout(url, key, "", "", columns), timeout_s=240)[0]


def loaded(known: Tokenizer, **options: Any) -> tasks.Tasks:
    task = {"kind": "asyncmoe.rollout.adapters.verifiers:Examples", "options": options}
    environment = {"kind": "openai", "agent": "asyncmoe.rollout.adapters.verifiers:rollout"}
    return tasks.load(minimal(task=task, environment=environment), known)


def test_tasks_are_a_task(known: Tokenizer) -> None:
    made = loaded(known, environment="doubling", arguments={"agent": AGENT}).training
    prompts = [made.prompt(n) for n in range(3)]
    assert {(prompt.text, prompt.answer) for prompt in prompts} == {(f"twice {n}?", str(2 * n)) for n in (21, 22, 23)}
    assert [message["role"] for message in prompts[0].messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"environment": "no_such_taskset"}, "taskset 'no_such_taskset' not found"),
        ({"arguments": {"taskset": {"endless": True}}}, "the option limit: got none, expected the number of tasks to take"),
        ({"arguments": {"agents": {}}}, "agents"),
    ],
)
def test_what_cannot_be_trained_is_refused(known: Tokenizer, options: dict[str, Any], said: str) -> None:
    with pytest.raises(AsyncmoeError, match=said) as caught:
        loaded(known, **{"environment": "doubling", **options})
    assert "\n" not in str(caught.value)


def test_an_endless_taskset_is_taken_from(known: Tokenizer) -> None:
    examples = adapter.Examples("doubling", {"taskset": {"endless": True}}, limit=5)
    assert [examples[n].answer for n in range(len(examples))] == ["42", "44", "46", "48", "50"]


def test_a_rollout_is_scored_by_its_own_answer(known: Tokenizer) -> None:
    examples = adapter.Examples("doubling", {"agent": AGENT})
    assert [played(in_turn(known, "it is 44"), known, examples[n].columns) for n in (0, 1)] == [0, 1]


def test_a_rollout_with_a_tool_server_is_one_trajectory(known: Tokenizer) -> None:
    examples = adapter.Examples("doubling", {"agent": AGENT, "taskset": {"task": {"tools": True}}})
    policy = in_turn(known, "let me see " + call("calculator_double", '{"x": 21}'), "it is 42")
    assert played(policy, known, examples[0].columns) == 1
    one_conversation(policy, known)
    assert "<|im_start|>tool\n42" in known.decode_all(policy.asked[1][1])
