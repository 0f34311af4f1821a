"""The report's data: every recorded series is there, whatever the state of the run; the timeline's columns are exact."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_runs import START, evaluation, write_run

from asyncmoe.telemetry.metric import numbers
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.report import figures, timeline
from asyncmoe.telemetry.report.figures import MOST_POINTS
from asyncmoe.telemetry.report.plots import PLOTS, SECTIONS
from asyncmoe.telemetry.report.run_page import page_of
from asyncmoe.telemetry.rollout_schema import Calls, Rollout, Scoring
from asyncmoe.telemetry.run import RunRecords, load
from asyncmoe.telemetry.schema import EVALUATION, METRICS, ROLLOUT, Span, Step


def _page(run_dir: Path) -> dict[str, Any]:
    page, _ = page_of([run_dir])
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(page))
    return {**found["runs"][0], "figures": {part["title"]: {one["title"]: one for one in part["figures"]} for part in found["sections"]}}


def _figures(run_dir: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Section -> title -> figure."""
    return _page(run_dir)["figures"]


def _curves(figure: dict[str, Any]) -> dict[str, list[float]]:
    """Name -> y."""
    return {trace["name"]: trace["y"] for trace in figure["data"]}


def test_a_whole_run_has_every_figure(tmp_path: Path) -> None:
    end = write_run(tmp_path, rl=30)
    write_run(tmp_path, rl=40, first=45, start=end + 1000)
    page = _page(tmp_path)
    assert page["what"].startswith("40 RL steps in ")
    assert page["what"].endswith("started 2 times")
    drawn = page["figures"]
    assert list(drawn) == ["Timeline", *SECTIONS]
    assert list(drawn["Learning"])[:3] == ["Evaluation", "Evaluation, pass@k by k", "Mean reward"]
    assert set(drawn["Idle time and queue"]) == {"Queue", "Engines at work"}
    assert list(_curves(drawn["Learning"]["Response length"])) == ["mean", *(f"quantile {share}" for share in ("0.1", "0.5", "0.9", "1.0"))]
    rows = {row[0]: row[1:] for row in page["summary"]}
    assert (rows["evaluation last"][0], rows["steps"][0]) == ("0.54 ± 0.05", "40")
    (recent,) = drawn["Timeline"].values()
    assert recent["title"].startswith("Last 10 steps; an engine generates during ")
    assert [mark["text"] for mark in recent["layout"]["annotations"]] == [f"step {n}" for n in range(31, 41)]


def test_every_recorded_number_is_in_a_figure(tmp_path: Path) -> None:
    """The oracle are the records themselves: each finite number of a step, and each metric of the other records."""
    write_run(tmp_path, warmup=2, rl=6)
    with JsonLines(tmp_path / ROLLOUT) as rollout:
        at = START + 3
        rollout.write(Rollout(time=at, scoring={"scorer": Scoring(scored=3, failed={"a": 1, "b": 1})}, tools={"add": Calls(calls=2)}))
    titles = {title: figure for part in _figures(tmp_path).values() for title, figure in part.items()}
    flat = [value for figure in titles.values() for trace in figure["data"] if trace["type"] == "scatter" for value in trace["y"]]
    heat = {field for plot in PLOTS if plot.heat for field in plot.curves}
    for step in load(tmp_path).rl:
        for one in numbers(step):
            if one.name not in heat:
                scale = 100 if one.metric.is_share else 1
                assert any(math.isclose(scale * one.value, value, rel_tol=1e-5) for value in flat), one
    assert list(_curves(titles["rollout: scoring failed"]).values()) == [[2.0]]
    assert list(_curves(titles["rollout: tools calls"])) == ["add"]


def test_metrics_of_ones_own_functions_are_drawn_each_on_its_own_scale(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        for step in range(1, 5):
            own = {"loss/gate $x_{": 0.5 / step, "advantage/deviation": None if step == 2 else 1e6 * step}
            named = {"plugin_metrics": own, "metrics": {"format": step / 4}}
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, loss=0.1, **named))
    learning = _figures(tmp_path)["Learning"]
    assert [trace["x"] for trace in learning["Objective: advantage/deviation"]["data"]] == [[1, 3, 4]]
    assert [trace["y"] for trace in learning["Objective: loss/gate $x_{"]["data"]] == [[0.5, 0.25, 0.166667, 0.125]]
    assert [trace["y"] for trace in learning["Metric format"]["data"]] == [[0.25, 0.5, 0.75, 1.0]]


def test_evaluation_sets_are_curves_of_their_own_with_error_bars(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=2)
    with JsonLines(tmp_path / EVALUATION) as evaluations:
        for version, error in ((2, 0.25), (3, None)):
            more = {"pass_at": {"1": 0.5, "8": 0.75}, "pass_at_stderr": {"1": error} if error else {}, "metrics": {"format": 0.75}}
            evaluations.write(evaluation(version, 0.5, name="gsm", reward_stderr=error, **more))
        evaluations.write({"time": 1.0, "version": 3, "questions": 2, "episodes": 2, "seconds": 1.0, "name": "old", "pass_at": {"1": 0.5}})
    learning = _figures(tmp_path)["Learning"]
    assert [trace["y"] for trace in learning["Evaluation, metric gsm format"]["data"]] == [[0.75, 0.75]]
    passes = _curves(learning["Evaluation, pass@k by k"])
    assert {name: passes[name] for name in passes if " " in name} == {"gsm 1": [50, 50], "gsm 8": [75, 75], "old 1": [50]}
    traces = {trace["name"]: trace for title in ("Evaluation", "Evaluation, pass@k by k") for trace in learning[title]["data"]}
    assert [traces[name]["error_y"]["array"] for name in ("gsm", "gsm 1")] == [[0.25, None], [25, None]]
    assert not any("error_y" in traces[name] for name in ("gsm 8", "old 1"))
    assert "error_y" not in learning["Mean reward"]["data"][0]


@pytest.mark.parametrize(
    ("field", "title", "given", "x", "keys", "shares"),
    [
        ("ages", "Age of the trained tokens", [{0: 3, 2: 1}, None, {1: 4}], [1, 3], ["0", "1", "2"], [[75, 0], [0, 100], [25, 0]]),
        (
            "rewards",
            "Distribution of rewards",
            [{0.0: 3, 1.0: 1}, {-0.08: 1, 1.0: 3}, {}, {1.0: 4}],
            [1, 2, 4],
            ["-0.1", "0", "1"],
            [[0, 25, 0], [75, 0, 0], [25, 75, 100]],
        ),
        ("routing_mismatch", "Tokens the trainer's router would send elsewhere", [{0: 0.5, 3: 0.25}], [1], ["0", "3"], [[50], [25]]),
    ],
)
def test_mappings_from_numbers_are_heat_maps_over_the_steps(
    tmp_path: Path, field: str, title: str, given: list[Any], x: list[int], keys: list[str], shares: list[list[float]]
) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        for step, value in enumerate(given, 1):
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, **{field: value}))
    (heat,) = next(figures[title] for figures in _figures(tmp_path).values() if title in figures)["data"]
    assert (heat["type"], heat["x"], heat["y"], heat["z"]) == ("heatmap", x, keys, shares)


def test_the_timeline_has_a_bar_for_each_stretch_of_the_last_steps(tmp_path: Path) -> None:
    steps = [Step(step=n, phase="rl", time=end, step_seconds=6.0) for n, end in ((1, 6.0), (2, 12.0))]
    spans = [Span("trainer.0", "train", -3, 5), Span("engine.0", "generate", 3, 7), Span("engine.0", "generate", 6, 22)]
    run = RunRecords([steps], [], [*spans, Span("engine.0", "pause", 5, 6)])
    (figure,) = timeline.section({"x": run}).figures
    bars = {trace["name"]: (trace["y"], trace["base"], trace["x"]) for trace in figure.data if trace["y"]}
    assert bars == {
        "trains": (["trainer.0"], [0], [5]),
        "generates": (["engine.0"], [3], [9]),
        "pauses for an update": (["engine.0"], [5], [1]),
    }
    assert [line["x0"] for line in figure.layout["shapes"]] == [6, 12]
    assert "generates during 40 %" in figure.title
    still = RunRecords([[Step(step=1, phase="rl", time=5.0, step_seconds=0.0)]], [], spans)
    assert timeline.section({"x": still}).figures == []


def test_many_curves_are_bounded_and_the_page_says_so(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.write(Step(step=1, phase="rl", time=START, rejected_by_rule={f"rule {n}": 0.1 for n in range(50)}))
    figure = _figures(tmp_path)["Agreement of engines and trainer"]["Rejected tokens"]
    assert len(figure["data"]) == figures.MOST_CURVES
    assert figure["about"].endswith("32 of 50 curves are drawn.")


@given(st.integers(0, 4 * MOST_POINTS), st.integers(0, 9))
def test_long_curves_are_thinned_without_bias(points: int, seed: int) -> None:
    draw = random.Random(seed)
    values = [(float(x), draw.random(), None) for x in range(points)]
    thin = figures.thinned(values)
    assert min(points, MOST_POINTS // 2) <= len(thin) <= MOST_POINTS
    size = -(-points // MOST_POINTS)
    sizes = [min(size, points - size * i) for i in range(len(thin))]
    assert sum(y * n for (_, y, _), n in zip(thin, sizes, strict=True) if y is not None) == pytest.approx(sum(y for _, y, _ in values))
