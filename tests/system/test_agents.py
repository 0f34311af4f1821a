"""Episodes with several agents and with tools, from end to end: the reward rises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.runs import AGREES, Command, json_lines, run, summary_of

pytestmark = [pytest.mark.system, pytest.mark.thorough]


def learn(example: str, directory: Path, *overrides: str) -> dict[str, Any]:
    """Run an example of `examples/agents`; its summary."""
    where = (f"run.dir={directory}", f"model.path={directory / 'model'}")
    Command("run", f"examples/agents/{example}.yaml", *where, *overrides).succeed(560.0, directory)
    summary = summary_of(directory)
    assert summary["max_staleness_seen"] <= 1
    return summary


def test_two_agents_of_one_policy_learn_together(tmp_path: Path) -> None:
    summary = learn("two_agents", tmp_path / "run", "run.steps=50")
    assert summary["reward_last"] > summary["reward_first"] + 0.1


def test_a_policy_learns_to_ask_its_tools_with_ranks_that_share_sequences(tmp_path: Path) -> None:
    summary = learn("tools", tmp_path / "run", "run.steps=20", "trainer.cp=2", AGREES)
    assert summary["reward_last"] > summary["reward_first"] + 0.3
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4


def test_an_agent_written_for_openai_is_trained(tmp_path: Path) -> None:
    """Its reward is the length of the policy's responses, so that there is something to train on."""
    directory = tmp_path / "run"
    agent = ("environment.kind=openai", "environment.agent=tests.engine.openai_agent:two_questions", "rollout.max_new_tokens=12")
    assert run(directory, "warmup.steps=0", "run.steps=2", *agent)["steps"] == 2
    *_, last = json_lines(directory / "rollout.jsonl")
    assert last["accepted"] >= 32
    assert last["rejected"] == {}
