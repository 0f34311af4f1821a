"""Summary numbers against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from telemetry_runs import evaluation, write_run

from asyncmoe.errors import DataError
from asyncmoe.telemetry.measured import known
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.run import RunRecords, load
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, EVALUATION, METRICS, ROLLOUT, TRAINER_SPANS, Resume, Span, Step
from asyncmoe.telemetry.summary import Row, difference, rows, summary_of, write_summary


def _rl(step: int, end: float, *, wait: float = 1.0, sync: float | None = 2.0, pause: float | None = 30.0, **more: float) -> Step:
    fields = {"version": step, "reward_mean": float(step), "tokens": 100, "staleness_max": 1, **more}
    fields["logprob_tokens_same_version"] = fields.pop("same", 0)
    return Step(step=step, phase="rl", time=end, step_seconds=10.0, wait_seconds=wait, sync_seconds=sync, pause_ms=pause, **fields)  # type: ignore[arg-type]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Warm-up step 1 at 0..10; RL steps 2..4 at 10..40, of which 4 is superseded; resumed at 3, then steps 4..8 at 100..150."""
    with JsonLines(tmp_path / METRICS) as metrics:
        warmup = Step(step=1, phase="warmup", time=10, step_seconds=10, wait_seconds=9, tokens=10**6, reward_mean=99, staleness_max=50)
        metrics.write(warmup)
        metrics.write(_rl(2, 20, wait=4, sync=1, pause=10))
        metrics.write(_rl(3, 30, sync=None, pause=None, logprob_diff_max_same_version=2e-5, same=7, train_infer_kl=0.5))
        undone = {"staleness_max": 60, "reward_mean": -7, "logprob_diff_max_same_version": 9, "same": 99, "train_infer_kl": 9}
        metrics.write(_rl(4, 40, wait=9, sync=50, pause=5000, **undone))
        metrics.write(Resume(3, 90))
        metrics.write(_rl(4, 110, sync=3, pause=20, staleness_max=2))
        metrics.write(_rl(5, 120, sync=0, pause=None, train_infer_kl=0.25, routing_mismatch={1: 0.1, 2: 0.3}))
        for step in (6, 7, 8):
            metrics.write(_rl(step, 70 + 10 * step, sync=4, pause=40, logprob_diff_max_same_version=1e-5, same=20, tokens=200))
    with JsonLines(tmp_path / EVALUATION) as evaluations:
        for version, reward in ((1, 0.1), (3, 0.2), (5, 0.9), (3, 0.3), (4, 0.4)):  # the run was resumed from version 3
            evaluations.write(evaluation(version, reward))
    with JsonLines(tmp_path / ROLLOUT) as rollout:  # the controller was started three times; it takes over what it had rejected
        for started, gone in ((50, {}), (90, {"scorer_nan": 4}), (95, {"scorer_nan": 5}), (150, {"scorer_nan": 6, "scorer_error": 8})):
            rollout.write(Rollout(time=10, started=started, rejected=gone))
    with JsonLines(tmp_path / TRAINER_SPANS) as spans:
        spans.write(Span("trainer.0", "train", 1, 9))  # warm-up
        spans.write(Span("trainer.0", "train", 12, 18))
        spans.write(Span("trainer.0", "train", 32, 40))  # superseded
        spans.write(Span("trainer.0", "train", 100, 104))
        spans.write(Span("trainer.1", "train", 100, 150))
        spans.write(Span("trainer.0", "wait", 18, 30))
    with JsonLines(tmp_path / CONTROLLER_SPANS) as spans:
        spans.write(Span("engine.0", "generate", 5, 14))  # 4 in RL time, 2 of the first train span
        spans.write(Span("engine.0", "generate", 13, 15))  # 1 more of both
        spans.write(Span("engine.1", "generate", 14, 16))  # 1 more of the train span
        spans.write(Span("engine.0", "generate", 25, 101))  # 5 + 1 in RL time; 1 of the second train span
        spans.write(Span("engine.1", "generate", 103, 113))  # 10 in RL time; 1 of the second train span
        spans.write(Span("engine.1", "pause", 16, 18))
    return tmp_path


def test_every_number(run_dir: Path) -> None:
    wall = 20 + 50  # two sessions
    summary = write_summary(run_dir)
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert not [path for path in run_dir.iterdir() if "summary" in path.name and path.name != "summary.json"]
    assert summary == {
        "steps": 7,
        "reward_first": pytest.approx((2 + 3 + 4 + 5 + 6) / 5),
        "reward_last": pytest.approx((4 + 5 + 6 + 7 + 8) / 5),
        "tokens_per_s": pytest.approx((4 * 100 + 3 * 200) / wall),
        "max_staleness_seen": 2,
        "sync_seconds_median": 4,  # of 1, 3, 4, 4, 4
        "switch_seconds": None,
        "pause_ms_median": 40,  # of 10, 20, 40, 40, 40
        "max_abs_logprob_diff_same_version": 2e-5,
        "same_version_tokens": 7 + 3 * 20,
        "same_version_versions": 4,
        "train_infer_kl_mean": 0.375,
        "routing_mismatch_mean": pytest.approx(0.2),
        "trainer_idle_share": pytest.approx((4 + 6 * 1) / wall),
        "engine_idle_share": pytest.approx(1 - ((5 + 5 + 1) + (2 + 10)) / 2 / wall),
        "overlap_share": pytest.approx((4 + 2) / (6 + 4)),
        "wall_seconds": wall,
        "evaluation_first": {"": msgspec.to_builtins(evaluation(1, 0.1))},
        "evaluation_last": {"": msgspec.to_builtins(evaluation(4, 0.4))},
        "trainer_restarts": 0,
        "rejected_share": pytest.approx((6 + 8) / 150),
        "rejected": {"scorer_error": 8, "scorer_nan": 6},
    }


def test_where_devices_are_shared_nobody_is_idle_while_the_other_works() -> None:
    steps = [
        Step(step=at, phase="rl", time=10.0 * at, step_seconds=10.0, wait_seconds=6.0, switch_seconds={"trainer_in": at, "engines_in": 1.0})
        for at in (1, 2, 4)
    ]
    spans = [Span("trainer.0", "wait", begin, begin + 5) for begin in (0, 10, 30)]
    spans += [Span("engine.0", "generate", 0, 4), Span("engine.0", "generate", 11, 15), Span("engine.0", "generate", 31, 35)]
    run = RunRecords([steps], [], spans)
    summary = summary_of(run)
    assert (summary.trainer_idle_share, summary.engine_idle_share) == (None, pytest.approx(1 - 12 / 15))
    assert summary.switch_seconds == {"trainer_in": 2.0, "engines_in": 1.0}
    assert ("switch seconds", 3.0) in [(row.name, row.number) for row in rows(run, summary)]


def test_every_evaluation_set_is_in_the_summary(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=0)
    with JsonLines(tmp_path / EVALUATION) as evaluations:
        for version, name, reward in ((1, "b", 0.1), (2, "a", 0.2), (2, "b", 0.3), (3, "a", 0.4)):
            evaluations.write(evaluation(version, reward, name=name))
    run = load(tmp_path)
    summary = summary_of(run)
    sets = (summary.evaluation_first, summary.evaluation_last)
    assert [{name: one.version for name, one in each.items()} for each in sets] == [{"b": 1, "a": 2}, {"b": 2, "a": 3}]
    found = [(row.name, row.number) for row in rows(run, summary) if row.name.startswith("evaluation") and row.error == 0.05]
    first, last = [("evaluation first a", 0.2), ("evaluation first b", 0.1)], [("evaluation last a", 0.4), ("evaluation last b", 0.3)]
    assert found == first + last


def test_rewards_have_the_standard_error_of_their_steps(tmp_path: Path) -> None:
    """With five steps or fewer the first are the last, and are shown once."""
    write_run(tmp_path, warmup=1, rl=12)
    run = load(tmp_path)
    rewards = known(step.reward_mean for step in run.rl)
    found = {row.name: row.error for row in rows(run, summary_of(run))}
    assert found["reward first"] == pytest.approx(np.std(rewards[:5], ddof=1) / 5**0.5)
    assert found["reward last"] == pytest.approx(np.std(rewards[-5:], ddof=1) / 5**0.5)
    short = RunRecords([run.rl[:5]], [], [])
    assert not {"reward first"} & {row.name for row in rows(short, summary_of(short))}


@pytest.mark.parametrize(
    ("first", "second", "unit", "expected"),
    [
        ((0.5, 0.03), (0.625, 0.04), "", "+0.125 ± 0.05"),
        ((0.5, None), (0.25, 0.04), "", "-0.25"),
        ((0.5, None), (0.25, None), "share of time", "-25 points"),
        ((90.0, None), (90.0, None), "seconds", "0 s"),
        ((None, None), (1.0, None), "", "–"),
    ],
)
def test_a_difference_is_beside_its_standard_error(first: tuple[Any, Any], second: tuple[Any, Any], unit: str, expected: str) -> None:
    one, other = (Row("", "", "", number=number, unit=unit, error=error) for number, error in (first, second))
    assert difference(one, other) == expected


def test_only_warmup_gives_nulls(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=5, rl=0)
    summary = write_summary(tmp_path)
    assert [summary.pop(name) for name in ("steps", "wall_seconds", "trainer_restarts")] == [0, 0, 0]
    assert [summary.pop(name) for name in ("evaluation_first", "evaluation_last")] == [{}, {}]
    assert set(summary.values()) == {None}


def test_no_step_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: got no step"):
        write_summary(tmp_path)
