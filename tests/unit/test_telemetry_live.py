"""The lines on the terminal, the advice, and the Prometheus exporter."""

from __future__ import annotations

import io
import re
import socket
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from rich.console import Console
from telemetry_runs import config_of, evaluation, write_run

from asyncmoe.errors import ConfigError
from asyncmoe.telemetry.advice import ALL_WELL, FEW_STEPS, NO_STEP, advise, merged
from asyncmoe.telemetry.format import duration, number, percent
from asyncmoe.telemetry.live import LiveView, line
from asyncmoe.telemetry.prometheus import Prometheus
from asyncmoe.telemetry.records import Follower, JsonLines
from asyncmoe.telemetry.rollout_schema import Rollout, Scoring
from asyncmoe.telemetry.schema import METRICS, Step


@pytest.mark.parametrize("terminal", [False, True])
def test_each_new_step_is_one_line(tmp_path: Path, terminal: bool) -> None:
    out = io.StringIO()
    end = write_run(tmp_path, warmup=2, rl=1)
    with LiveView(config_of(tmp_path, 10), Console(file=out, force_terminal=terminal)) as view:
        view.refresh()
        assert out.getvalue() == ""
        write_run(tmp_path, warmup=2, rl=3, first=4, start=end + 10)
        view.refresh()
        view.refresh()
        view.say("[bold] stopping")
        started = [r for r in Follower(tmp_path).poll() if isinstance(r, Rollout)][-1].started
    lines = out.getvalue().splitlines()
    assert [text.split("  ")[0] for text in lines] == [
        "step 2/10",
        "step 3/10",
        "evaluated version 3",
        "[bold] stopping",
        f"rejected {percent(1 / started)} of {started} started (scorer_timeout 1)",
    ]
    assert re.search(r"  reward 0\.\d+  .*  left \d+ s$", lines[0])
    assert lines[2] == "evaluated version 3   reward 0.21 ± 0.05   25 % failed"


def test_advice_is_said_when_it_changes(tmp_path: Path) -> None:
    out = io.StringIO()
    with LiveView(config_of(tmp_path, 10), Console(file=out, width=300)) as view, JsonLines(tmp_path / METRICS) as metrics:
        for n in range(1, 20):
            reward_std = 0.0 if n >= 7 else 0.3
            metrics.write(Step(step=n, phase="rl", time=float(n), step_seconds=1.0, wait_seconds=0.0, reward_std=reward_std))
            view.refresh()
    (advice,) = [text for text in out.getvalue().splitlines() if text.startswith("advice")]
    assert advice.startswith("advice: Every response gets the same reward")


def test_unmeasured_values_are_left_out_of_a_line() -> None:
    assert line(Step(step=5, phase="rl", time=0.0, reward_mean=0.5), 2, 10, 125.0) == "step 3/10  reward 0.5  left 2 min 05 s"
    assert line(Step(step=1, phase="warmup", time=0.0), 2, 10) == "warm-up 1/2"


# ---------------------------------------------------------------- advice


def steps(count: int = 5, **changes: Any) -> list[Step]:
    """RL steps of two seconds each, normal except for the given values."""
    waits = {"wait_seconds": 0.2, "sync_wait_seconds": 0.1, "sync_seconds": 1.5, "pause_ms": 30.0}
    well = {"step_seconds": 2.0, "reward_mean": 1.0, "reward_std": 0.3, **waits, **changes}
    return [Step(step=n, phase="rl", time=2.0 * n, **well) for n in range(1, count + 1)]


def rollout(**changes: Any) -> list[Rollout]:
    """Records of engines that first start, and then generate; the newest counts what is given."""
    busy = changes.pop("busy", 0.9)
    at_work = [Rollout(time=t, engine_utilization={"engine.0": use}) for t, use in ((1.0, 0.0), (3.0, busy), (5.0, busy))]
    return [*at_work, Rollout(time=6.0, **({"started": 50, "accepted": 40} | changes))]


@pytest.mark.parametrize(
    ("changed", "counted", "said"),
    [
        ({"logprob_diff_max_same_version": 0.8}, {}, "differ by up to 0.8 nats"),
        ({"reward_std": 0.0}, {}, "same reward (1)"),
        ({}, {"rejected": {"nan": 1, "timeout": 3}}, "8 % of the trajectories were rejected, most of them because of timeout"),
        ({"clip_fraction": 0.3}, {}, "30 % of the tokens are clipped"),
        ({"tis_capped_fraction": 0.3}, {}, "30 % of the tokens are capped"),
        ({"wait_seconds": 1.22}, {}, "Trainer idle 61 % of a median step: the engines are the bottleneck"),
        ({}, {"busy": 0.45}, "Engines idle 55 %: the trainer is the bottleneck"),
        ({"wait_seconds": 1.0}, {"busy": 0.55}, "they wait for each other"),
        ({}, {"dropped": {"stale": 4, "equal": 30}, "requeued": {"stale": 2}}, "15 % of the trajectories were dropped or requeued"),
        ({"sync_wait_seconds": 0.6}, {}, "30 % of the time (1.5 s an update)"),
        ({"pause_ms": 900.0}, {}, "pause 900 ms per update"),
        ({"switch_seconds": {"trainer_in": 0.4, "update": 0.2}, "wait_seconds": 1.0}, {"busy": 0.45}, "30 % of the time (0.6 s a step)"),
    ],
)
def test_one_figure_off_is_one_sentence(changed: dict[str, float], counted: dict[str, Any], said: str) -> None:
    (sentence,) = advise(steps(**changed), rollout(**counted))
    assert said in sentence


def test_a_run_that_was_mostly_its_start_gets_no_advice_on_speed() -> None:
    slow = {"wait_seconds": 1.4, "sync_wait_seconds": 0.6}
    assert advise(steps(2, **slow), rollout(busy=0.2)) == [FEW_STEPS]
    assert "differ by up to" in advise(steps(2, **slow, logprob_diff_max_same_version=0.8))[0]
    first = Step(step=1, phase="rl", time=2.0, step_seconds=60.0, wait_seconds=55.0)
    assert advise([first, *steps(8)[1:]], rollout()) == [ALL_WELL], "one slow start does not move it"


def test_advice_is_quiet_when_all_is_well_and_puts_wrong_results_first() -> None:
    assert advise(steps(), rollout()) == [ALL_WELL]
    in_turn = {"switch_seconds": {"update": 0.2}, "wait_seconds": 1.4, "pause_ms": 900.0}
    assert advise(steps(**in_turn), rollout(busy=0.3)) == [ALL_WELL], "while one works, the other sleeps"
    assert advise([]) == [NO_STEP]
    assert "differ by up to" in advise(steps(wait_seconds=1.9, logprob_diff_max_same_version=0.8))[0]


def test_a_remedy_for_several_runs_is_given_once_the_most_urgent_first() -> None:
    slow, other, fine = "Trainer idle 61 %: add engines", "Trainer idle 50 %: add engines", [ALL_WELL]
    assert merged({"a": [slow, NO_STEP]}) == [(slow, [], False), (NO_STEP, [], False)]
    found = merged({"b": [slow], "a": ["Loss: stop", other], "c": [slow], "d": fine, "e": fine})
    assert found == [
        ("Add engines", ["b, c: Trainer idle 61 %", "a: Trainer idle 50 %"], False),
        ("Stop", ["a: Loss"], False),
        (ALL_WELL, ["d, e"], True),
    ]


# ---------------------------------------------------------------- words


def test_words() -> None:
    numbers = (None, 0, 0.01234, 0.5, 12.0, 99.96, 1234.5, 56789.1)
    assert " ".join(number(x) for x in numbers) == "– 0 0.0123 0.5 12 100 1234 56,789"
    assert number(3e-5, "nats", 2) == "3e-05 nats"
    assert [percent(x) for x in (None, 0, 0.004, 0.613, 0.996, 1)] == ["–", "0 %", "0.4 %", "61 %", "99.6 %", "100 %"]
    assert [duration(x) for x in (None, 0.25, 41.4, 59.7, 192, 7500)] == ["–", "0.25 s", "41 s", "1 min 00 s", "3 min 12 s", "2 h 05 min"]


# ---------------------------------------------------------------- sinks


def test_prometheus_serves_the_newest_numbers() -> None:
    scoring = {"teacher": Scoring(in_flight=4, failed={"scorer_timeout": 2, "scorer_garbage": 1})}
    sink = Prometheus(0)
    try:
        sink.feed([Step(step=3, phase="rl", time=1.0, reward_mean=0.25, ages={0: 5, 1: 2})])
        sink.feed(
            [Step(step=4, phase="rl", time=2.0, reward_mean=0.5, ages={1: 7}), Rollout(time=2.0, scoring=scoring), evaluation(3, 0.75)]
        )
        with urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        with pytest.raises(ConfigError, match=r"telemetry\.prometheus_port"):
            Prometheus(sink.port)
    finally:
        sink.close()
    shown = {text for text in lines if not text.startswith("#")}
    assert {"asyncmoe_step 4.0", "asyncmoe_step_reward_mean 0.5", "asyncmoe_evaluation_reward_mean 0.75"} <= shown
    nested = {f'asyncmoe_rollout_scoring_{name}{{who="teacher"}} {value}' for name, value in (("in_flight", 4.0), ("failed", 3.0))}
    assert {'asyncmoe_step_ages{age="1"} 7.0', *nested} <= shown
    assert not [text for text in shown if 'age="0"' in text]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", sink.port)) != 0
