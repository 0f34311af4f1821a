"""The figures of `asyncmoe bench step`: of records made with known speeds, and of a recorded run against its spans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncmoe import models
from asyncmoe.plan import memory
from asyncmoe.plan import speeds as plan_speeds
from asyncmoe.telemetry import run as records
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import Step
from asyncmoe.telemetry.speeds import SETTLING, speeds
from asyncmoe.telemetry.summary import summary_of
from tests.configs import demo, minimal

RECORDED = Path(__file__).parent / "data" / "recorded_run"
"""The demo without warm-up: nine steps of 128 trajectories, whose prompts have four tokens and responses at most six."""
MODELS = Path(__file__).parents[2] / "examples" / "cluster" / "models"


def test_known_speeds_are_found() -> None:
    config = minimal(trainer={"ranks": 4}, engines={"count": 2, "tp": 4})
    each = {
        "phase": "rl",
        "wait_seconds": 4.0,
        "sync_wait_seconds": 1.0,
        "tokens": 1000,
        "sampled_tokens": 800,
        "response_tokens_mean": 8.0,
    }
    steps = [Step(step=n, time=100.0 + 10 * n, step_seconds=10.0 if n > 1 else 99.0, **each) for n in range(1, 6)]
    busy = {"engine.0": 0.25, "engine.1": 0.75}
    rollout = [Rollout(time=float(t), running=12, generated_tokens=50 * t, engine_utilization=busy) for t in range(160)]
    found = speeds(config, 3, steps, rollout)
    assert found["format"] == 1
    assert found["parameters"] == 3
    assert found["trainer"] == {"gpus": 4, "tokens": 1000, "step_s": 5.0, "tokens_per_s": 200.0}
    assert found["engines"] == {"gpus": 8, "running": 12, "tokens_per_s": 100.0}
    assert found["lengths"] == {"prompt": 2.0, "response": 8.0}
    assert found["measured"] == {"steps": 4, "seconds": 40.0, "trainer_waits": 0.4, "engines_idle": 0.5}


def test_a_recorded_run_agrees_with_its_spans() -> None:
    run = records.load(RECORDED)
    found = speeds(demo(), 3, run.rl, run.rollout)
    counted = replace(run, sessions=[run.rl[SETTLING:]])
    summary, over, trainer = summary_of(counted), found["measured"], found["trainer"]
    assert over["seconds"] == pytest.approx(summary.wall_seconds, rel=0.02)
    assert over["trainer_waits"] == pytest.approx(summary.trainer_idle_share, abs=0.02)
    assert over["engines_idle"] == pytest.approx(summary.engine_idle_share, abs=0.1)
    trained = sum(end - begin for begin, end in run.intervals("train", "trainer.0") if end > counted.rl_windows[0][0])
    assert trainer["step_s"] * over["steps"] == pytest.approx(trained, rel=0.1)
    assert trainer["tokens_per_s"] * trained == pytest.approx(sum(step.tokens or 0 for step in counted.rl), rel=0.1)
    sampled = sum(step.sampled_tokens or 0 for step in counted.rl)
    assert found["engines"]["tokens_per_s"] * (1 - over["engines_idle"]) * over["seconds"] == pytest.approx(sampled, rel=0.2)
    assert found["lengths"]["prompt"] == pytest.approx(4)
    assert 5 < found["lengths"]["response"] <= 6
    assert found["engines"]["running"] == 64


@pytest.mark.parametrize(("name", "total", "active"), [("Qwen3-30B-A3B", 30.5e9, 3.3e9), ("Qwen3-235B-A22B", 235e9, 22e9)])
def test_parameters_are_the_published_ones(name: str, total: float, active: float) -> None:
    hf = models.load_hf_config(MODELS / f"{name}.json")
    assert memory.whole(hf).all == pytest.approx(total, rel=0.01)
    assert plan_speeds.active(hf) == pytest.approx(active, rel=0.02)
