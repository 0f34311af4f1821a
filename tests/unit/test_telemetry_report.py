"""The report's data: every recorded series is there, whatever the state of the run; the timeline's columns are exact."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from telemetry_runs import START, evaluation, write_run

from asyncmoe.errors import DataError
from asyncmoe.telemetry.distribution import STEPS
from asyncmoe.telemetry.metric import declared, numbers
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.report import figures, series, timeline
from asyncmoe.telemetry.report.figures import SECTIONS
from asyncmoe.telemetry.report.run_page import page_of
from asyncmoe.telemetry.report.series import MOST_POINTS
from asyncmoe.telemetry.rollout_schema import Calls, Rollout, Scoring
from asyncmoe.telemetry.run import RunRecords, load
from asyncmoe.telemetry.schema import EVALUATION, METRICS, ROLLOUT, Span, Step


def _page(run_dir: Path) -> dict[str, Any]:
    page, _ = page_of([run_dir])
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(page))
    return {**found["runs"][0], "figures": {part["title"]: {one["title"]: one for one in part["figures"]} for part in found["sections"]}}


def _figures(run_dir: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Section -> title -> figure."""
    found: dict[str, dict[str, dict[str, Any]]] = _page(run_dir)["figures"]
    return found


def _curves(figure: dict[str, Any]) -> dict[str, list[float]]:
    """Name -> y, without running means."""
    return {trace["name"]: trace["y"] for trace in figure["data"] if "running mean" not in trace["name"]}


def test_a_whole_run_has_every_figure(tmp_path: Path) -> None:
    end = write_run(tmp_path, rl=30)
    write_run(tmp_path, rl=40, first=45, start=end + 1000)
    page = _page(tmp_path)
    assert page["what"].startswith("40 RL steps in ")
    assert page["what"].endswith("started 2 times")
    drawn = page["figures"]
    assert list(drawn) == ["Timeline", *SECTIONS]
    assert list(drawn["Learning"])[:3] == ["Evaluation", "Evaluation, pass@k by k", "Mean reward"]
    assert {"Distribution of rewards", "Gradient norm", "Learning rate", "Entropy", "Policy loss"} <= set(drawn["Learning"])
    assert {"Clipped tokens", "Truncated responses", "Warm-up loss"} <= set(drawn["Learning"])
    assert {"Effective sample size"} <= set(drawn["Agreement of engines and trainer"])
    assert set(drawn["Idle time and queue"]) == {"Queue", "Engines at work"}
    assert list(_curves(drawn["Learning"]["Response length"])) == ["mean", *(f"quantile {share}" for share in ("0.1", "0.5", "0.9", "1.0"))]
    rows = {row[0]: row[1:] for row in page["summary"]}
    assert rows["evaluation last"] == ["0.54", "version 54   reward 0.54 ± 0.05   25 % failed"]
    assert rows["steps"] == ["40", "RL steps."]
    recent, whole = drawn["Timeline"].values()
    assert recent["title"].startswith("Last 10 steps: during ")
    (heat,) = recent["data"]
    engines = ["engine 0", "engine 1"]
    assert heat["y"] == [
        "trainer trains",
        "trainer sends weights",
        "trainer waits for a batch",
        *engines,
        "an engine is paused",
        "both at once",
    ]
    assert max(heat["z"][5]) > 0
    assert [mark["text"] for mark in recent["layout"]["annotations"]][-1] == "step 40"
    assert sorted(mark["text"] for mark in whole["layout"]["annotations"]) == ["RL begins", "resumed"]


def test_every_recorded_number_is_in_a_figure(tmp_path: Path) -> None:
    """The oracle are the records themselves: each finite number of a step, and each metric of the other records."""
    write_run(tmp_path, warmup=2, rl=6)
    with JsonLines(tmp_path / ROLLOUT) as rollout:
        at = START + 3
        rollout.write(Rollout(time=at, scoring={"scorer": Scoring(scored=3, failed={"a": 1, "b": 1})}, tools={"add": Calls(calls=2)}))
    titles = {title: figure for part in _figures(tmp_path).values() for title, figure in part.items()}
    flat = [value for figure in titles.values() for trace in figure["data"] if trace["type"] == "scatter" for value in trace["y"]]
    for step in load(tmp_path).rl:
        for one in numbers(step):
            if one.metric.plot is None or one.metric.plot.heat is None:
                scale = 100 if one.metric.is_share else 1
                assert any(math.isclose(scale * one.value, value, rel_tol=1e-5) for value in flat), one
    assert list(_curves(titles["rollout: scoring failed"]).values()) == [[2.0]]
    assert list(_curves(titles["rollout: tools calls"])) == ["add"]


def test_ages_and_layers_are_heat_maps_over_the_steps(tmp_path: Path) -> None:
    ages = [{0: 3, 2: 1}, None, {1: 4}]
    with JsonLines(tmp_path / METRICS) as metrics:
        for step, each in enumerate(ages, 5):
            routing = {0: 0.5, 3: 0.25} if step == 5 else None
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, ages=each, routing_mismatch=routing))
    drawn = _figures(tmp_path)
    (heat,) = drawn["Staleness"]["Age of the trained tokens"]["data"]
    assert (heat["type"], heat["x"], heat["y"], heat["z"]) == ("heatmap", [1, 3], ["0", "1", "2"], [[75, 0], [0, 100], [25, 0]])
    (routing_map,) = drawn["Agreement of engines and trainer"]["Tokens the trainer's router would send elsewhere"]["data"]
    assert (routing_map["y"], routing_map["z"]) == (["0", "3"], [[50], [25]])


@settings(max_examples=25)
@given(st.integers(1, 1200), st.integers(1, 400), st.integers(0, 9))
def test_heat_maps_are_bounded_and_keep_shares(steps: int, highest: int, seed: int) -> None:
    draw = random.Random(seed)
    rl = [Step(step=n, phase="rl", time=float(n), ages={draw.randrange(highest): 3, 0: 1}) for n in range(1, steps + 1)]
    keys, columns = series.grid(RunRecords("x", [rl], [], []), Step, "ages", declared(Step)["ages"])
    assert len(keys) <= STEPS + 2
    assert {len(column) for column in columns} == {1 + len(keys)}
    assert len(columns) <= MOST_POINTS
    assert all(sum(column[1:]) == pytest.approx(100) for column in columns)  # type: ignore[arg-type]


def test_metrics_of_ones_own_functions_are_drawn_each_on_its_own_scale(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        for step in range(1, 5):
            own = {"loss/gate $x_{": 0.5 / step, "advantage/deviation": None if step == 2 else 1e6 * step}
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, loss=0.1, plugin_metrics=own))
    learning = _figures(tmp_path)["Learning"]
    assert [trace["x"] for trace in learning["Your function's advantage/deviation"]["data"]] == [[1, 3, 4]]
    assert [trace["y"] for trace in learning["Your function's loss/gate $x_{"]["data"]] == [[0.5, 0.25, 0.166667, 0.125]]


def test_evaluation_sets_are_curves_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=2)
    with JsonLines(tmp_path / EVALUATION) as evaluations:
        for name, reward in (("gsm", 0.5), ("math", 0.25)):
            evaluations.write(evaluation(3, reward, name=name, pass_at={"1": reward, "4": 1.0}))
    drawn = _figures(tmp_path)
    assert [(name, y[-1]) for name, y in _curves(drawn["Learning"]["Evaluation"]).items()][-2:] == [("gsm", 0.5), ("math", 0.25)]
    passes = _curves(drawn["Learning"]["Evaluation, pass@k by k"])
    assert {name: passes[name] for name in passes if " " in name} == {"gsm 1": [50], "gsm 4": [100], "math 1": [25], "math 4": [100]}


def test_evaluations_have_error_bars(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=2)
    with JsonLines(tmp_path / EVALUATION) as evaluations:
        for version, error in ((2, 0.25), (3, None)):
            more = {"pass_at": {"1": 0.5, "8": 0.75}, "pass_at_stderr": {"1": error} if error else {}}
            evaluations.write(evaluation(version, 0.5, name="gsm", reward_stderr=error, **more))
        evaluations.write({"time": 1.0, "version": 3, "questions": 2, "episodes": 2, "seconds": 1.0, "name": "old", "pass_at": {"1": 0.5}})
    learning = _figures(tmp_path)["Learning"]
    traces = {trace["name"]: trace for title in ("Evaluation", "Evaluation, pass@k by k") for trace in learning[title]["data"]}
    assert [traces[name]["error_y"]["array"] for name in ("gsm", "gsm 1")] == [[0.25, None], [25, None]]
    assert traces["gsm 1"]["customdata"] == [" ± 25", ""]
    assert not any("error_y" in traces[name] for name in ("gsm 8", "old 1"))
    assert "Standard error of `reward_mean`" in learning["Evaluation"]["about"]
    assert "error_y" not in learning["Mean reward"]["data"][0]


def test_rewards_are_a_heat_map_of_those_there_are(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        for step, rewards in enumerate([{0.0: 3, 1.0: 1}, {-0.08: 1, 1.0: 3}, {}, {1.0: 4}], 1):
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, rewards=rewards))
    learning = _figures(tmp_path)["Learning"]
    (heat,) = learning["Distribution of rewards"]["data"]
    assert (heat["x"], heat["y"]) == ([1, 2, 4], ["-0.1", "0", "1"])
    assert heat["z"] == [[0, 25, 0], [75, 0, 0], [25, 75, 100]]


def test_only_warmup(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=3, rl=0)
    page = _page(tmp_path)
    assert page["what"].startswith("no RL step yet")
    assert list(page["figures"]["Learning"]) == ["Warm-up loss"]
    assert page["figures"]["Throughput"] == {}


def test_a_single_step_without_anything_else(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.write({"step": 1, "phase": "rl", "time": 5.0})
    page = _page(tmp_path)
    assert "The loss of step 1 is not a finite number" in page["advice"][0]
    assert (page["figures"]["Timeline"], page["settings"], page["versions"]) == ({}, {}, {})


def test_records_of_older_versions_are_read(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.write(
            {"step": 1, "phase": "rl", "time": START, "step_seconds": 5.0, "kl_engine": 0.5, "routing_differs": {"0": 0.25}, "gone": 3}
        )
    with JsonLines(tmp_path / ROLLOUT) as rollout:
        rollout.write({"time": START - 1, "dropped": 7})
    drawn = _figures(tmp_path)
    assert drawn["Agreement of engines and trainer"]["KL(engine ‖ trainer)"]["data"][0]["y"] == [0.5]
    assert drawn[figures.REST]["rollout: dropped"]["data"][0]["y"] == [7]


def test_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got no step"):
        _page(tmp_path)


def test_many_curves_are_bounded_and_the_page_says_so(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.write(Step(step=1, phase="rl", time=START, rejected_by_rule={f"rule {n}": 0.1 for n in range(50)}))
    figure = _figures(tmp_path)["Agreement of engines and trainer"]["Rejected tokens"]
    assert len(figure["data"]) == figures.MOST_CURVES
    assert figure["about"].endswith("32 of 50 curves are drawn.")


def test_a_curve_that_turns_all_the_time_has_its_running_mean(tmp_path: Path) -> None:
    draw = random.Random(0)
    with JsonLines(tmp_path / METRICS) as metrics:
        for n in range(1, 41):
            metrics.write(
                Step(
                    step=n,
                    phase="rl",
                    time=START + n,
                    loss=draw.random(),
                    lr=1.0,
                    entropy=float(n * n),
                    grad_norm=draw.random() if n < 9 else None,
                )
            )
    learning = _figures(tmp_path)["Learning"]
    assert [trace["name"] for trace in learning["Policy loss"]["data"]] == ["each", "running mean"]
    assert [len(learning[title]["data"]) for title in ("Learning rate", "Entropy", "Gradient norm")] == [1, 1, 1]


def test_a_running_mean_has_a_window_around_each_value() -> None:
    assert series.running_mean([0.0, 3.0, 6.0, 0.0, 1.0]) == pytest.approx([0, 3, 2, 7 / 3, 1])


def _run(spans: list[Span], *windows: tuple[float, float]) -> RunRecords:
    sessions = [[Step(step=n, phase="rl", time=end, step_seconds=end - begin)] for n, (begin, end) in enumerate(windows, 1)]
    return RunRecords("x", sessions, [], spans)


def test_timeline_columns_by_hand() -> None:
    train, generate = Span("trainer.0", "train", 2, 5), Span("engine.0", "generate", 3, 22)
    run = _run([train, generate, Span("engine.0", "pause", 5, 6)], (0, 6), (20, 24))
    edges, lanes = timeline.lanes(run, [(0, 6), (20, 24)], columns=5)
    assert edges.tolist() == [0, 2, 4, 6, 8, 10]
    assert {name: shares.tolist() for name, shares in lanes.items() if any(shares)} == {
        "trainer trains": [0, 1, 0.5, 0, 0],
        "engine 0": [0, 0.5, 1, 1, 0],
        "an engine is paused": [0, 0, 0.5, 0, 0],
        "both at once": [0, 0.5, 0.5, 0, 0],
    }
    _, whole = timeline.section({"x": run}).figures
    assert "during 67 % of the RL training time" in whole.title
    assert whole.layout["shapes"][0]["x0"] == 6


def test_a_run_that_took_no_time_has_no_timeline() -> None:
    assert timeline.section({"x": _run([Span("trainer.0", "train", 2, 5)], (5, 5))}).figures == []


def test_overlap_in_the_timeline_leaves_out_the_warmup(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=50, rl=5)
    run = load(tmp_path)
    run = replace(run, spans=[*run.spans, Span("engine.0", "generate", START, START + 1000)])
    assert "during 100 % of" in timeline.section({"x": run}).figures[1].title
    warm = RunRecords("x", [[step for step in run.steps if step.phase == "warmup"]], [], run.spans)
    assert "during" not in timeline.section({"x": warm}).figures[1].title


@given(st.integers(0, 4 * MOST_POINTS), st.integers(0, 9))
def test_long_curves_are_thinned_without_bias(points: int, seed: int) -> None:
    draw = random.Random(seed)
    values = [(float(x), draw.random(), None) for x in range(points)]
    thin = series.thinned(values)
    assert min(points, MOST_POINTS // 2) <= len(thin) <= MOST_POINTS
    size = -(-points // MOST_POINTS)
    sizes = [min(size, points - size * i) for i in range(len(thin))]
    assert sum(y * n for (_, y, _), n in zip(thin, sizes, strict=True) if y is not None) == pytest.approx(sum(y for _, y, _ in values))


def test_scoring_and_rejections_are_rows(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=1)
    with JsonLines(tmp_path / ROLLOUT) as rollout:
        judge = Scoring(scored=140, seconds=70.0, failed={"scorer_<nan>": 20}, retried=2)
        rollout.write(Rollout(time=START, started=140, rejected={"scorer_<nan>": 28}, scoring={"scorer": judge}))
    rows = {row[0]: row[1:] for row in _page(tmp_path)["summary"]}
    assert rows["scorer"] == ["140", "140 scored in 0.44 s each   20 failed (scorer_<nan> 20)   2 retried"]
    assert rows["rejected"] == ["20 %", "20 % of 140 started (scorer_<nan> 28)"]
