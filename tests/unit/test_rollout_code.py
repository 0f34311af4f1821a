"""A user's tasks, scorers, agents and tools, and the packages that they need, are looked for before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncmoe import config as configuration
from asyncmoe import installed
from asyncmoe.errors import UserError
from asyncmoe.launch import rollout_code


def test_code_for_rollouts_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installed, "has", lambda module: False)
    (tmp_path / "here.py").write_text("raise SystemExit(1)")
    values: dict[str, Any] = {"run": {"dir": "run", "steps": 1}, "model": {"path": "none"}}
    adapter = "asyncmoe.rollout.adapters.verifiers:rollout"
    values |= {"task": {"kind": "here:Sums"}, "scoring": {"scorer": "nothere:y"}, "environment": {"kind": "openai", "agent": adapter}}
    config = configuration.parse(values)
    assert rollout_code.named(config) == {"task.kind": "here:Sums", "scoring.scorer": "nothere:y", "environment.agent": adapter}
    with pytest.raises(UserError) as caught:
        rollout_code.check(config)
    scorer, agent = str(caught.value).splitlines()
    assert scorer.startswith("scoring.scorer: got nothere:y, and no module nothere, expected a module in this directory")
    assert agent.startswith("environment.agent: got no module verifiers, expected the extra verifiers; run: ")
    tools = {"names": ["here:f", "calculator", "nothere:g"], "mcp": {"s": {"command": "sh"}}}
    config = configuration.parse(
        {**values, "scoring": {}, "task": {"kind": "arithmetic"}, "environment": {"kind": "tools", "tools": tools}}
    )
    assert rollout_code.named(config) == {"environment.tools.names": "here:f, nothere:g"}
    with pytest.raises(UserError) as caught:
        rollout_code.check(config)
    function, server = str(caught.value).splitlines()
    assert function.startswith("environment.tools.names: got nothere:g, and no module nothere")
    assert server.startswith("environment.tools.mcp: got no module mcp, expected the extra mcp; run: ")
