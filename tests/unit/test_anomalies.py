"""Rules about values that a healthy run does not have."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kept_trajectory
import numpy as np
import pytest

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.config.anomalies import AnomaliesSection
from asyncmoe.errors import AnomalyFound, ConfigError
from asyncmoe.queue.group_buffer import describe
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.schema import METRICS, Step
from asyncmoe.trainer import anomalies, batch_guard, evidence
from asyncmoe.trainer.anomalies import History, judge, verdict

ROOT = Path(__file__).parents[2]
HEALTHY = {"kl_engine": 1e-5, "grad_norm": 1.0, "reward": 0.98, "reward_std": 0.14}
ATTACKED = {"kl_engine": 3.24, "grad_norm": 1066.0, "age": 1.0, "reward": 0.70, "reward_std": 0.46, "loss": 0.1}
"""Figures of the step after another user replaced the weights of an engine."""


def after(values: dict[str, float], steps: int, rules: AnomaliesSection | None = None) -> History:
    history = History()
    for _ in range(steps):
        history = history.then(values, False, (rules or AnomaliesSection()).window)
    return history


def rules(**given: Any) -> AnomaliesSection:
    return AnomaliesSection.model_validate(given)


def test_the_defaults_catch_replaced_weights_of_an_engine() -> None:
    found = {one.rule: one.action for one in judge(rules(), ATTACKED, after(HEALTHY, 10))}
    assert found == {"kl_engine": "skip", "grad_norm": "warn", "reward": "warn"}
    # In its first steps after a start there is no running median, but weights that are not the trainer's are found all the same.
    assert verdict(judge(rules(), ATTACKED, History()), History(), rules()) == "skip"


def test_the_defaults_pass_what_healthy_runs_measured() -> None:
    """The extremes of the demo, of runs of adapters and of agents, of 12 to 1,500 steps (largest of each figure, not of one step)."""
    history = after({"kl_engine": 1e-6, "grad_norm": 1e-3, "reward": 0.5, "reward_std": 0.36}, 20)
    assert judge(rules(), {"kl_engine": 0.03, "grad_norm": 8.2, "reward": 0.5 - 0.121, "age": 1.0, "loss": 0.1}, history) == ()


@pytest.mark.parametrize("name", ["loss", "kl_engine", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stops_or_skips_whatever_other_rules_say(name: str, value: float) -> None:
    off = {"kl_engine": {"action": "off"}, "grad_norm": {"action": "off"}}
    for action in ("stop", "skip"):
        chosen = rules(not_finite=action, **off)
        (found,) = judge(chosen, {name: value}, History())
        assert (found.rule, found.action, verdict([found], History(), chosen)) == ("not_finite", action, action)


def test_a_rule_with_several_bounds_needs_all_exceeded_and_a_factor_needs_a_median() -> None:
    both = rules(grad_norm={"above": 10, "factor": 5, "action": "stop"}, after=3)
    usual = after({"grad_norm": 4.0}, 3)
    assert judge(both, {"grad_norm": 19.9}, usual) == ()
    assert [one.action for one in judge(both, {"grad_norm": 20.1}, usual)] == ["stop"]
    assert judge(both, {"grad_norm": 9.9}, after({"grad_norm": 1.0}, 3)) == ()
    assert judge(both, {"grad_norm": 1e9}, after({"grad_norm": 4.0}, 2)) == ()
    assert judge(rules(grad_norm={"above": None, "factor": None, "action": "stop"}), {"grad_norm": 1e30}, usual) == ()
    assert [one.rule for one in judge(rules(age={"above": 3, "action": "skip"}), {"age": 4.0}, usual)] == ["age"]


def test_rewards_that_were_all_equal_have_no_scale() -> None:
    assert judge(rules(), {"reward": 0.0}, after({"reward": 1.0, "reward_std": 0.0}, 20)) == ()
    absolute = rules(reward={"below": 0.5, "spreads": None, "action": "stop"})
    assert [one.action for one in judge(absolute, {"reward": 0.4}, History())] == ["stop"]


def test_one_skipped_batch_more_than_allowed_stops_the_run() -> None:
    history, seen = History(), []
    for _ in range(5):
        seen.append(verdict(judge(rules(skips=2), {"kl_engine": 2.0}, history), history, rules(skips=2)))
        history = history.then({"kl_engine": 2.0}, seen[-1] == "skip", 32)
    assert seen == ["skip", "skip", "stop", "skip", "skip"]


def test_history_is_bounded_and_begins_with_the_records_of_the_run() -> None:
    steps = [
        Step(step=n, phase="rl", time=float(n), train_infer_kl=n / 100, grad_norm=None, reward_mean=1.0, skipped_updates=n > 48 or None)
        for n in range(1, 51)
    ]
    history = anomalies.history_of(steps, 32)
    assert history.values["kl_engine"] == tuple(n / 100 for n in range(19, 51))
    assert "grad_norm" not in history.values
    assert history.skips == 2
    assert history.median("kl_engine", 33) is None


@pytest.mark.parametrize(
    "given",
    [
        "kl_engine.above=0",
        "kl_engine.factor=1",
        "grad_norm.factor=.inf",
        "age.above=-1",
        "kl_engine.action=halt",
        "window=0",
        "not_finite=off",
    ],
)
def test_wrong_rules_are_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=f"verify.anomalies.{given.partition('=')[0]}"):
        configuration.load(ROOT / "examples" / "demo.yaml", [f"verify.anomalies.{given}"])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank without a process group."""
    monkeypatch.setattr(batch_guard.collectives, "everyones", lambda mine: [mine])
    monkeypatch.setattr(batch_guard.collectives, "barrier", lambda: None)


def watch(tmp_path: Path, *given: str, done: int = 0) -> tuple[Config, batch_guard.AnomalyWatch]:
    loaded = configuration.load(ROOT / "examples" / "demo.yaml", [f"run.dir={tmp_path}", *given])
    return loaded, batch_guard.AnomalyWatch(loaded, SimpleNamespace(rank=0, reports_trajectories=True), done)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_a_stop_keeps_evidence_that_only_the_owner_can_read(tmp_path: Path) -> None:
    made = {0: kept_trajectory.trajectory(5, 1)[0], 3: kept_trajectory.trajectory(4, 2)[0]}
    _, one = watch(tmp_path, "verify.anomalies.kl_engine.action=stop")
    guard = one.batch([describe(t) for t in made.values()], made, 6)
    with pytest.raises(AnomalyFound, match=r"step 7: kl_engine is 3.24, above kl_engine.above 1 .*evidence/step-7"):
        guard.loss(0.5, {"train_infer_kl": 3.24})
    kept = evidence.folder(tmp_path, 7)
    assert sorted(path.name for path in kept.iterdir()) == ["anomaly.json", "batch-0.npz", "config.json", "items.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.iterdir()} == {0o600}
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert json.loads((kept / "anomaly.json").read_bytes())["findings"][0]["rule"] == "kl_engine"
    assert len(json.loads((kept / "items.json").read_bytes())) == 2
    with np.load(kept / "batch-0.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["3/logprobs"], made[3].logprobs)
        assert len(arrays.files) == 8


@pytest.mark.usefixtures("alone")
def test_a_guard_that_refused_refuses_the_rest_of_the_batch(tmp_path: Path) -> None:
    made = {0: kept_trajectory.trajectory(5, 1)[0]}
    _, one = watch(tmp_path)
    guard = one.batch([describe(t) for t in made.values()], made, 0)
    assert guard.loss(0.5, {"train_infer_kl": 0.001})
    assert guard.gradients(1e6)  # warned of only, and not before there is a median
    assert not guard.loss(0.5, {"train_infer_kl": 5.0})
    assert not guard.loss(0.5, {"train_infer_kl": 0.001})
    guard.end()
    assert (guard.skipped, set(guard.found), one.history.skips) == ("kl_engine", {"kl_engine"}, 1)


@pytest.mark.usefixtures("alone")
def test_a_resumed_run_remembers_its_steps_but_no_superseded_one(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as lines:
        for n in range(1, 13):
            lines.write(Step(step=n, phase="rl", time=float(n), grad_norm=float(n)))
    _, one = watch(tmp_path, done=9)
    assert one.history.values["grad_norm"] == tuple(float(n) for n in range(1, 10))
