"""The report: every section is there and drawn, whatever the state of the run; the timeline's columns are exact."""

from __future__ import annotations

import base64
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_runs import START, write_run

from asyncmoe.errors import DataError
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.report import html, report
from asyncmoe.telemetry.rollout_schema import Rollout, Scoring
from asyncmoe.telemetry.run import RunRecords, load
from asyncmoe.telemetry.schema import METRICS, ROLLOUT, Span, Step
from asyncmoe.telemetry.series import MOST_POINTS, Series
from asyncmoe.telemetry.timeline import merge_equal, timeline

SECTIONS = [
    "Summary",
    "Timeline",
    "Learning",
    "Staleness",
    "Agreement of engines and trainer",
    "Idle time and queue",
    "Weight updates",
    "Throughput",
]


def _sections(page: str) -> dict[str, str]:
    return {part.split("</h2>")[0]: part for part in page.split("<h2>")[1:]}


def _images(part: str) -> list[str]:
    return [base64.b64decode(data).decode() for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', part)]


def _texts(picture: str) -> set[str]:
    # The texts are drawn as outlines; matplotlib leaves each as a comment beside its outline.
    return set(re.findall(r"<!-- (.*?) -->", picture))


def test_a_whole_run_has_every_plot(tmp_path: Path) -> None:
    end = write_run(tmp_path / "a <run>", rl=30)
    write_run(tmp_path / "a <run>", rl=40, first=45, start=end + 1000)
    path = report(tmp_path / "a <run>")
    page = path.read_text()
    assert path.name == "report.html"
    assert len(page) < 2_000_000
    assert "a &lt;run&gt;" in page
    assert "a <run>" not in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "40 RL steps" in page
    assert "started 2 times" in page
    sections = _sections(page)
    assert list(sections) == SECTIONS
    assert {title: len(_images(part)) for title, part in sections.items()} == dict(zip(SECTIONS, (0, 2, 5, 2, 5, 2, 2, 2), strict=True))
    pictures = [picture for part in sections.values() for picture in _images(part)]
    for picture in pictures:
        ElementTree.fromstring(picture)
    drawn = set().union(*map(_texts, pictures))
    for title in (
        "Mean reward",
        "Evaluation",
        "Policy loss",
        "Age of the trained tokens",
        "Queue",
        "Idle",
        "Weight sync",
        "Trained tokens",
        "Sampled tokens",
    ):
        assert title in drawn
    assert "0.2 → 0.54 ± 0.05" in sections["Summary"]
    assert "versions 20 and 54; 64 episodes, 25 % failed" in sections["Summary"]
    recent, whole = map(_texts, _images(sections["Timeline"]))
    assert {"trainer", "engine 0", "engine 1", "both at once", "step 40", "generate", "paused"} <= recent
    assert {"RL begins", "resumed"} <= whole
    assert any(re.fullmatch(r"Whole run: during \S+ % of the RL training time an engine generates", text) for text in whole)


def test_metrics_of_ones_own_functions_are_drawn_each_on_its_own_scale(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        for step in range(1, 5):
            own = {"loss/gate $x_{": 0.5 / step, "advantage/deviation": None if step == 2 else 1e6 * step}
            metrics.write(Step(step=step, phase="rl", time=START + step, step_seconds=1.0, loss=0.1, plugin_metrics=own))
    drawn = [_texts(picture) for picture in _images(_sections(report(tmp_path).read_text())["Learning"])]
    titles = ["Your function's advantage/deviation", "Your function's loss/gate $x_{"]
    assert [sum(title in texts for texts in drawn) for title in titles] == [1, 1]
    assert not any(set(titles) <= texts for texts in drawn)


def test_the_words_for_an_image_say_what_it_shows(tmp_path: Path) -> None:
    write_run(tmp_path, rl=30)
    shown = re.findall(r'<img alt="([^"]*)"', report(tmp_path).read_text())
    assert len(set(shown)) == len(shown)
    assert "Idle: share of the step, % over RL step (trainer, engines)" in shown
    assert any(re.match(r"Last 10 steps: .*: trainer, engine 0, engine 1, both at once over seconds \(train, ", text) for text in shown)


def test_only_warmup(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=3, rl=0)
    page = report(tmp_path).read_text()
    sections = _sections(page)
    assert "no RL step yet" in page
    assert "Warm-up loss" in _texts(_images(sections["Learning"])[0])
    assert "Nothing recorded." in sections["Throughput"]


def test_a_single_step_without_anything_else(tmp_path: Path) -> None:
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.write({"step": 1, "phase": "rl", "time": 5.0})
    assert "The loss of step 1 is not a finite number" in report(tmp_path).read_text()


def test_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got no step"):
        report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=2, rl=3)
    assert html(load(tmp_path)) == html(load(tmp_path))


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=10, rl=1500, engines=12)
    assert report(tmp_path).stat().st_size < 2_000_000


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


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=30))
def test_merged_columns_draw_the_same(shares: list[float]) -> None:
    edges = [0.25 * i for i in range(len(shares) + 1)]
    values, merged = merge_equal(shares, edges)
    assert len(merged) == len(values) + 1
    assert all(one != other for one, other in pairwise(values))
    drawn = [values[max(i for i, edge in enumerate(merged[:-1]) if edge <= x)] for x in edges[:-1]]
    assert drawn == shares


@given(st.integers(0, 4 * MOST_POINTS), st.integers(0, 9))
def test_long_curves_are_thinned_without_bias(points: int, seed: int) -> None:
    draw = random.Random(seed)
    values = [(float(x), draw.random()) for x in range(points)]
    thin = Series.of([*values, (1e9, None)])
    assert min(points, MOST_POINTS // 2) <= len(thin.x) == len(thin.y) <= MOST_POINTS
    size = -(-points // MOST_POINTS)
    sizes = [min(size, points - size * i) for i in range(len(thin.y))]
    assert sum(y * n for y, n in zip(thin.y, sizes, strict=True)) == pytest.approx(sum(y for _, y in values))
    assert len(thin.smooth().y) == len(thin.y)


def test_scoring_and_rejections_are_rows_over_all_starts(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=1)
    with JsonLines(tmp_path / ROLLOUT) as rollout:
        for started in (100, 40):
            judge = Scoring(scored=started, seconds=started / 2, failed={"scorer_<nan>": 10}, retried=1)
            rollout.write(Rollout(time=START, started=started, rejected={"scorer_<nan>": 14}, scoring={"scorer": judge}))
    summary = _sections(html(load(tmp_path)))["Summary"]
    assert (
        "<td>Scoring: scorer</td><td>140</td><td>140 scored in 0.44 s each   20 failed (scorer_&lt;nan&gt; 20)   2 retried</td>" in summary
    )
    assert "<td>Rejected</td><td>20 %</td><td>trajectories: 20 % of 140 started (scorer_&lt;nan&gt; 28)</td>" in summary
