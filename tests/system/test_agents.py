"""Episodes with several agents and with tools, from end to end: the reward rises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.runs import Command, logs, run

pytestmark = pytest.mark.system


def learn(example: str, directory: Path, *overrides: str) -> tuple[float, float]:
    """Run an example of `examples/agents`; mean reward of its first and of its last steps."""
    model = directory / "model"
    where = (f"run.dir={directory}", f"model.path={model}")
    command = Command("run", f"examples/agents/{example}.yaml", *where, *overrides)
    status, out, error = command.finish(560.0)
    assert status == 0, f"status {status}\n{out[-1500:]}\n{error[-3000:]}\n{logs(directory)}"
    assert command.gone(), command.alive()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["max_staleness_seen"] <= 1
    return summary["reward_first"], summary["reward_last"]


@pytest.mark.thorough
def test_two_agents_of_one_policy_learn_together(tmp_path: Path) -> None:
    first, last = learn("two_agents", tmp_path / "run", "run.steps=50")
    assert last > first + 0.1


@pytest.mark.thorough
def test_a_policy_learns_to_ask_its_tools(tmp_path: Path) -> None:
    first, last = learn("tools", tmp_path / "run", "run.steps=20")
    assert last > first + 0.3


@pytest.mark.thorough
def test_an_agent_written_for_openai_is_trained(tmp_path: Path) -> None:
    """Its reward is how much it made the policy say, so that there is something to train on."""
    directory = tmp_path / "run"
    agent = ("environment.kind=openai", "environment.agent=tests.engine.openai_agent:two_questions", "rollout.max_new_tokens=12")
    summary = run(directory, "warmup.steps=0", "run.steps=2", *agent)
    assert summary["steps"] == 2
    last = json.loads((directory / "rollout.jsonl").read_text().splitlines()[-1])
    assert last["accepted"] >= 32
    assert last["rejected"] == {}
