"""The report's data: every recorded series is there, whatever the state of the run; the timeline's columns are exact."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_pages import figures_of
from telemetry_runs import START, evaluation, write_run

from asyncmoe.errors import DataError
from asyncmoe.telemetry.metric import declared, numbers
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.report import figures, series
from asyncmoe.telemetry.report.run_page import SECTIONS, SampleList, run_page
from asyncmoe.telemetry.report.series import MOST_POINTS, MOST_ROWS, Series
from asyncmoe.telemetry.report.timeline import timeline
from asyncmoe.telemetry.rollout_schema import Calls, Rollout, Scoring
from asyncmoe.telemetry.run import RunRecords, load
from asyncmoe.telemetry.schema import EVALUATION, METRICS, ROLLOUT, Span, Step

NO_SAMPLES = SampleList((), 0, ())


def _page(run_dir: Path) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(run_page(run_dir, run_dir.name, NO_SAMPLES)))
    return found


def test_a_whole_run_has_every_figure(tmp_path: Path) -> None:
    end = write_run(tmp_path, rl=30)
    write_run(tmp_path, rl=40, first=45, start=end + 1000)
    page = _page(tmp_path)
    assert page["what"].startswith("40 RL steps in ")
    assert page["what"].endswith("started 2 times")
    drawn = figures_of(page)
    assert list(drawn) == [*SECTIONS, figures.REST]
    learning = ["Mean reward", "Evaluation", "Evaluation, pass@k by k", "Response length", "Policy loss", "Entropy", "Reward spread"]
    assert list(drawn["Learning"])[:7] == learning
    assert {"Distribution of rewards, over the steps", "Gradient norm", "Learning rate"} <= set(drawn["Learning"])
    assert {"Clipped tokens", "Truncated responses", "Warm-up loss"} <= set(drawn["Learning"])
    assert {"Effective sample size", "Importance ratio, quantiles"} <= set(drawn["Agreement of engines and trainer"])
    assert list(drawn["Idle time and queue"])[:2] == ["Idle", "Queue"]
    lengths = drawn["Learning"]["Response length"]
    assert [curve["name"] for curve in lengths["curves"]] == ["mean", "quantile 0.1", "quantile 0.5", "quantile 0.9", "quantile 1.0"]
    rows = {row[0]: row[1:] for row in page["summary"]}
    assert rows["Evaluation"] == ["0.2 → 0.54 ± 0.05", "mean reward of versions 20 and 54; 64 episodes, 25 % failed"]
    recent, whole = page["timelines"]
    assert recent["title"].startswith("Last 10 steps: during ")
    assert [lane["name"] for lane in recent["lanes"]] == ["trainer", "engine 0", "engine 1", "both at once"]
    assert [mark["text"] for mark in recent["marks"]][-1] == "step 40"
    assert recent["pauses"]
    assert [mark["text"] for mark in whole["marks"]] == ["RL begins", "resumed"]


def test_every_recorded_number_is_in_a_figure(tmp_path: Path) -> None:
    """The oracle are the records themselves: each finite number of a step, and each metric of the other records."""
    write_run(tmp_path, warmup=2, rl=6)
    with JsonLines(tmp_path / ROLLOUT) as rollout:
        at = START + 3
        rollout.write(Rollout(time=at, scoring={"scorer": Scoring(scored=3, failed={"a": 1, "b": 1})}, tools={"add": Calls(calls=2)}))
    run = load(tmp_path)
    lines = [figure for part in figures_of(_page(tmp_path)).values() for figure in part.values() if figure["kind"] == "lines"]
    curves = [curve["y"] for figure in lines for curve in figure["curves"]]
    flat = [value for values in curves for value in values]
    for step in run.rl:
        for one in numbers(step):
            if declared(Step)[one.name].plot is None or declared(Step)[one.name].plot.bars is None:  # type: ignore[union-attr]
                scale = 100 if declared(Step)[one.name].is_share else 1
                assert any(math.isclose(scale * one.value, value, rel_tol=1e-5) for value in flat), one
    titles = {figure["title"]: figure for figure in lines}
    assert titles["rollout: scoring failed"]["curves"][0]["y"] == [2.0]
    assert titles["rollout: tools calls"]["curves"][0]["name"] == "add"


def test_ages_and_layers_are_heat_maps_over_the_steps(tmp_path: Path) -> None:
    ages = [{0: 3, 2: 1}, None, {1: 4}]
    with JsonLines(tmp_path / METRICS) as metrics:
        for step, each in enumerate(ages, 5):
            routing = {0: 0.5, 3: 0.25} if step == 5 else None
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, ages=each, routing_mismatch=routing))
    drawn = figures_of(_page(tmp_path))
    heat = drawn["Staleness"]["Age of the trained tokens, over the steps"]
    assert (heat["kind"], heat["columns"], heat["keys"]) == ("heat", [1, 3], [0, 1, 2])
    assert heat["values"] == [[75, 0], [0, 100], [25, 0]]
    assert drawn["Staleness"]["Age of the trained tokens, all steps"]["heights"] == [37.5, 50, 12.5]
    routing_map = drawn["Agreement of engines and trainer"]["Tokens the trainer's router would send elsewhere, over the steps"]
    assert (routing_map["keys"], routing_map["values"]) == ([0, 1, 2, 3], [[50], [None], [None], [25]])


@settings(max_examples=25)
@given(st.integers(1, 1200), st.integers(1, 400), st.integers(0, 9))
def test_heat_maps_are_bounded_and_keep_shares(steps: int, highest: int, seed: int) -> None:
    draw = random.Random(seed)
    rl = [Step(step=n, phase="rl", time=float(n), ages={draw.randrange(highest): 3, 0: 1}) for n in range(1, steps + 1)]
    grid = series.grid(RunRecords("x", [rl], [], []), Step, "ages", declared(Step)["ages"])
    assert len(grid.keys) == len(grid.values) <= MOST_ROWS
    assert {len(row) for row in grid.values} == {len(grid.x)}
    assert len(grid.x) <= MOST_POINTS
    assert all(sum(column) == pytest.approx(100) for column in zip(*grid.values, strict=True))  # type: ignore[arg-type]


def test_metrics_of_ones_own_functions_are_drawn_each_on_its_own_scale(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        for step in range(1, 5):
            own = {"loss/gate $x_{": 0.5 / step, "advantage/deviation": None if step == 2 else 1e6 * step}
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, loss=0.1, plugin_metrics=own))
    learning = figures_of(_page(tmp_path))["Learning"]
    assert [curve["x"] for curve in learning["Your function's advantage/deviation"]["curves"]] == [[1, 3, 4]]
    assert [curve["y"] for curve in learning["Your function's loss/gate $x_{"]["curves"]] == [[0.5, 0.25, 0.166667, 0.125]]


def test_evaluation_sets_are_curves_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=2)
    with JsonLines(tmp_path / EVALUATION) as evaluations:
        for name, reward in (("gsm", 0.5), ("math", 0.25)):
            evaluations.write(evaluation(3, reward, name=name, pass_at={"1": reward, "4": 1.0}))
    drawn = figures_of(_page(tmp_path))
    assert [(curve["name"], curve["y"][-1]) for curve in drawn["Learning"]["Evaluation"]["curves"]][-2:] == [("gsm", 0.5), ("math", 0.25)]
    passes = {curve["name"]: curve["y"] for curve in drawn["Learning"]["Evaluation, pass@k by k"]["curves"]}
    assert {name: passes[name] for name in passes if " " in name} == {"gsm 1": [50], "gsm 4": [100], "math 1": [25], "math 4": [100]}


def test_evaluations_have_error_bars(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=2)
    with JsonLines(tmp_path / EVALUATION) as evaluations:
        for version, error in ((2, 0.25), (3, None)):
            more = {"pass_at": {"1": 0.5, "8": 0.75}, "pass_at_stderr": {"1": error} if error else {}}
            evaluations.write(evaluation(version, 0.5, name="gsm", reward_stderr=error, **more))
        evaluations.write({"time": 1.0, "version": 3, "questions": 2, "episodes": 2, "seconds": 1.0, "name": "old", "pass_at": {"1": 0.5}})
    learning = figures_of(_page(tmp_path))["Learning"]
    curves = {curve["name"]: curve["errors"] for title in ("Evaluation", "Evaluation, pass@k by k") for curve in learning[title]["curves"]}
    assert (curves["gsm"], curves["gsm 1"], curves["gsm 8"], curves["old 1"]) == ([0.25, None], [25, None], [None, None], [None])
    assert "Standard error of `reward_mean`" in learning["Evaluation"]["about"]
    assert learning["Mean reward"]["curves"][0]["errors"] == []


def test_rewards_are_a_heat_map_of_those_there_are(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        for step, rewards in enumerate([{0.0: 3, 1.0: 1}, {-0.08: 1, 1.0: 3}, {}, {1.0: 4}], 1):
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, rewards=rewards))
    learning = figures_of(_page(tmp_path))["Learning"]
    heat = learning["Distribution of rewards, over the steps"]
    assert (heat["columns"], heat["keys"]) == ([1, 2, 4], [-0.1, 0, 1])
    assert heat["values"] == [[0, 25, 0], [75, 0, 0], [25, 75, 100]]
    assert learning["Distribution of rewards, all steps"]["heights"] == pytest.approx([100 / 12, 25, 200 / 3], rel=1e-5)


def test_only_warmup(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=3, rl=0)
    page = _page(tmp_path)
    assert page["what"].startswith("no RL step yet")
    assert list(figures_of(page)["Learning"]) == ["Warm-up loss"]
    assert figures_of(page)["Throughput"] == {}


def test_a_single_step_without_anything_else(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.write({"step": 1, "phase": "rl", "time": 5.0})
    page = _page(tmp_path)
    assert "The loss of step 1 is not a finite number" in page["advice"][0]
    assert (page["timelines"], page["settings"], page["versions"]) == ([], {}, {})


def test_records_of_older_versions_are_read(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.write(
            {"step": 1, "phase": "rl", "time": START, "step_seconds": 5.0, "kl_engine": 0.5, "routing_differs": {"0": 0.25}, "gone": 3}
        )
    with JsonLines(tmp_path / ROLLOUT) as rollout:
        rollout.write({"time": START - 1, "dropped": 7})
    drawn = figures_of(_page(tmp_path))
    assert drawn["Agreement of engines and trainer"]["KL(engine ‖ trainer)"]["curves"][0]["y"] == [0.5]
    assert drawn[figures.REST]["rollout: dropped"]["curves"][0]["y"] == [7]


def test_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got no step"):
        _page(tmp_path)


def test_many_curves_are_bounded_and_the_page_says_so(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.write(Step(step=1, phase="rl", time=START, rejected_by_rule={f"rule {n}": 0.1 for n in range(50)}))
    figure = figures_of(_page(tmp_path))["Agreement of engines and trainer"]["Rejected tokens"]
    assert len(figure["curves"]) == figures.MOST_CURVES
    assert figure["about"].endswith("The first 32 of 50 are drawn.")


def test_sawtoothed_curves_are_found() -> None:
    draw = random.Random(0)
    noisy = Series([float(x) for x in range(40)], [draw.random() for _ in range(40)])
    assert noisy.jagged
    assert not Series(noisy.x, [x * x for x in noisy.x]).jagged
    assert not Series(noisy.x, [1.0] * 40).jagged
    assert not Series(noisy.x[:8], noisy.y[:8]).jagged


def _run(spans: list[Span], *windows: tuple[float, float]) -> RunRecords:
    sessions = [[Step(step=n, phase="rl", time=end, step_seconds=end - begin)] for n, (begin, end) in enumerate(windows, 1)]
    return RunRecords("x", sessions, [], spans)


def test_timeline_columns_by_hand() -> None:
    train, generate = Span("trainer.0", "train", 2, 5), Span("engine.0", "generate", 3, 22)
    lines = timeline(_run([train, generate], (0, 6), (20, 24)), [(0, 6), (20, 24)], columns=5)
    assert lines.edges == [0, 2, 4, 6, 8, 10]
    assert {lane.name: {what: list(shares) for what, shares in lane.parts.items()} for lane in lines.lanes} == {
        "trainer": {"train": [0, 1, 0.5, 0, 0], "sync": [0] * 5, "wait": [0] * 5},
        "engine 0": {"generate": [0, 0.5, 1, 1, 0]},
        "both": {"both": [0, 0.5, 0.5, 0, 0]},
    }
    assert lines.overlap == pytest.approx(2 / 3)
    assert [lines.position(time) for time in (-1, 3, 10, 21, 99)] == [0, 3, 6, 7, 10]


def test_overlap_in_the_timeline_leaves_out_the_warmup(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=50, rl=5)
    run = load(tmp_path)
    run = replace(run, spans=[*run.spans, Span("engine.0", "generate", START, START + 1000)])
    assert timeline(run, run.windows).overlap == pytest.approx(1)
    assert timeline(run, [(START, START + 5)]).overlap is None


@given(st.integers(0, 4 * MOST_POINTS), st.integers(0, 9))
def test_long_curves_are_thinned_without_bias(points: int, seed: int) -> None:
    draw = random.Random(seed)
    values = [(float(x), draw.random()) for x in range(points)]
    thin = Series.of([*values, (1e9, None)])
    assert min(points, MOST_POINTS // 2) <= len(thin.x) == len(thin.y) <= MOST_POINTS
    size = -(-points // MOST_POINTS)
    sizes = [min(size, points - size * i) for i in range(len(thin.y))]
    assert sum(y * n for y, n in zip(thin.y, sizes, strict=True)) == pytest.approx(sum(y for _, y in values))


def test_scoring_and_rejections_are_rows_over_all_starts(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=1)
    with JsonLines(tmp_path / ROLLOUT) as rollout:
        for started in (100, 40):
            judge = Scoring(scored=started, seconds=started / 2, failed={"scorer_<nan>": 10}, retried=1)
            rollout.write(Rollout(time=START, started=started, rejected={"scorer_<nan>": 14}, scoring={"scorer": judge}))
    rows = {row[0]: row[1:] for row in _page(tmp_path)["summary"]}
    assert rows["Scoring: scorer"] == ["140", "140 scored in 0.44 s each   20 failed (scorer_<nan> 20)   2 retried"]
    assert rows["Rejected"] == ["20 %", "trajectories: 20 % of 140 started (scorer_<nan> 28)"]
