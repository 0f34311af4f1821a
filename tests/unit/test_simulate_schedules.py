"""Random plants that jitter, fail and drain: no token too old, no trajectory lost from the count, no standstill. And the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from asyncmoe.cli import app
from asyncmoe.errors import ConfigError, InvariantBroken
from asyncmoe.queue.admission import Admission
from asyncmoe.simulate.plant import LANDINGS, MODES, Hazards, Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.trace import SimulatedRun
from asyncmoe.simulate.workload import parse

MILLION = 1_000_000

hazards = st.builds(
    Hazards,
    score_failure=st.sampled_from([0.0, 0.02, 0.2]),
    engine_mtbf_s=st.sampled_from([0.0, 300.0, 5000.0]),
    engine_restart_s=st.sampled_from([0.0, 5.0, 200.0]),
    trainer_failure=st.sampled_from([0.0, 0.1, 0.5]),
    trainer_restart_s=st.sampled_from([0.0, 30.0]),
    jitter=st.sampled_from([0.0, 0.3, 1.0]),
)
plants = st.builds(
    Plant,
    engines=st.integers(1, 6),
    concurrency=st.integers(1, 12),
    prefill_s=st.sampled_from([0.0, 0.05, 2.0]),
    groups=st.integers(1, 6),
    group_size=st.integers(1, 4),
    train_s=st.sampled_from([0.5, 10.0, 60.0]),
    sync_s=st.sampled_from([0.0, 3.0, 40.0]),
    pause_s=st.sampled_from([0.0, 1.0]),
    landing=st.sampled_from(LANDINGS),
    score_s=st.sampled_from([0.0, 0.5, 5.0]),
    score_sigma=st.sampled_from([0.0, 1.5]),
    score_concurrency=st.sampled_from([0, 1, 8]),
    mode=st.sampled_from(MODES),
    eta=st.integers(0, 5),
    steps=st.integers(1, 60),
    seed=st.integers(0, 1 << 20),
    hazards=hazards,
)
workloads = st.sampled_from(["lognormal:median=300", "lognormal:median=100,sigma=2,icc=0.5", "fixed:tokens=50", "search", "tools"])


def check(plant: Plant, found: SimulatedRun) -> None:
    """What must hold whatever happened."""
    assert found.oldest_age <= plant.admission.eta == found.eta
    assert max(found.ages) <= found.eta
    assert sum(found.ages.values()) == pytest.approx(1)
    ledger = dict(found.ledger)
    assert ledger["trained"] == plant.steps * plant.batch
    assert ledger.pop("started") == sum(ledger.values())
    assert ledger["dropped"] == sum(found.dropped.values())
    assert ledger["rejected"] == sum(found.rejected.values())
    # Until the last step is served, one version less counts.
    assert ledger["running"] + ledger["queued"] + ledger["leased"] <= (found.eta + 1) * plant.batch
    assert 0 <= found.trainer_idle <= 1
    assert 0 <= found.engine_idle <= 1
    assert found.engine_rate <= 1 + 1e-9


@settings(max_examples=300)
@given(plant=plants, workload=workloads)
def test_whatever_goes_wrong_the_bound_holds_and_the_counts_add_up(plant: Plant, workload: str) -> None:
    check(plant, simulate(plant, parse(workload)))


@settings(max_examples=40)
@given(plant=plants, workload=workloads, room=st.floats(0, 1))
def test_a_queue_that_is_too_small_only_delays(plant: Plant, workload: str, room: float) -> None:
    """Down to one batch: groups wait for space outside, and oldest first may no longer hold between those and the ones inside."""
    most = (plant.admission.eta + 1) * plant.batch
    check(plant, simulate(replace(plant, queue_capacity=plant.batch + int(room * (most - plant.batch))), parse(workload)))


def test_capacity_law_over_a_million_trajectories() -> None:
    plant = Plant(
        engines=64,
        concurrency=16,
        groups=64,
        group_size=8,
        train_s=20.0,
        sync_s=5.0,
        pause_s=0.5,
        score_s=2.0,
        score_sigma=1.0,
        score_concurrency=512,
        eta=4,
        steps=MILLION // 512 + 1,
        hazards=Hazards(
            score_failure=0.002, engine_mtbf_s=20_000, engine_restart_s=120, trainer_failure=0.02, trainer_restart_s=60, jitter=0.5
        ),
    )
    found = simulate(plant, parse("lognormal:median=1024,cap=16384,icc=0.3"))
    check(plant, found)
    assert found.ledger["trained"] >= MILLION
    assert found.releases
    assert set(found.rejected) == {"not_scored", "engine_died"}
    assert found.dropped["stale"]


def test_a_policy_that_forgets_staleness_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator looks at the ages itself, it does not take the policy's word for them."""
    monkeypatch.setattr(Admission, "is_stale", lambda *_: False)
    plant = Plant(engines=4, concurrency=16, groups=8, group_size=8, train_s=1.0, eta=1, steps=40)
    with pytest.raises(InvariantBroken, match="trained a token of age"):
        simulate(plant, parse("lognormal"))


def test_a_policy_that_lets_nothing_start_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "may_start", lambda *_: False)
    with pytest.raises(InvariantBroken, match="nothing can happen any more at step 0"):
        simulate(Plant(), parse("lognormal"))


@settings(max_examples=15)
@given(plant=plants, workload=workloads)
def test_the_same_seed_gives_the_same_run(plant: Plant, workload: str) -> None:
    assert simulate(plant, parse(workload)) == simulate(plant, parse(workload))


def test_another_seed_gives_another_run() -> None:
    plant = Plant(engines=4, groups=8, steps=6)
    assert simulate(plant, parse("lognormal")).wall != simulate(replace(plant, seed=1), parse("lognormal")).wall


# ---------------------------------------------------------------- the command

SMALL = [
    "--engines",
    "4",
    "--trainer-gpus",
    "2",
    "--concurrency",
    "8",
    "--groups",
    "8",
    "--group-size",
    "4",
    "--train-s",
    "5",
    "--steps",
    "12",
]


def invoke(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False, env={"COLUMNS": "140"})
    assert found.exit_code == 0, found.output
    return found.output


def test_command_compares(tmp_path: Path) -> None:
    output = invoke(*SMALL, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg"))
    figures = json.loads((tmp_path / "a.json").read_text())
    assert set(figures["modes"]) == {"sync", "one_step_off", "async"}
    wanted = {
        "wall",
        "t_gen",
        "t_train",
        "g",
        "e",
        "speedup",
        "s_pools",
        "s_max",
        "efficiency",
        "trainer_idle",
        "engine_idle",
        "ages",
        "dropped",
    }
    assert wanted <= set(figures["modes"]["async"])
    assert figures["modes"]["sync"]["speedup"] == 1
    assert f"{figures['modes']['async']['speedup']:.2f}x" in output
    assert "eta 4" in output
    assert "6 GPUs" in output
    assert "</svg>" in (tmp_path / "a.svg").read_text()


def test_command_sweeps(tmp_path: Path) -> None:
    output = invoke(*SMALL, "--sweep", "--etas", "1,4", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png"))
    figures = json.loads((tmp_path / "a.json").read_text())
    assert {point["eta"] for point in figures["points"]} == {1, 4}
    assert figures["fastest"]["step_s"] == min(point["step_s"] for point in figures["points"])
    advised = re.search(r"advised.*: (\d+) engine GPUs, (\d+) trainer GPUs, eta (\d+)", output)
    assert advised
    assert [int(n) for n in advised.groups()] == [figures["advised"][key] for key in ("engine_gpus", "trainer_gpus", "eta")]
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_lengths_of_one_s_own(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("10\n20\n30\n40\n")
    groups = parse(str(lengths)).groups(64, 0)
    drawn = [turns[0] for turns, _ in next(groups)]
    assert 10 <= min(drawn) < 15 < 35 < max(drawn) <= 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "0"], "--engines: got 0, expected a whole number from 1"),
        (["--train-s", "nan"], "--train-s: got nan, expected a positive number"),
        (["--train-s", "-1"], "--train-s: got -1.0, expected a positive number"),
        (["--pause-s", "inf"], "--pause-s: got inf, expected 0 or more"),
        (["--eta", "-1"], "--eta: got -1, expected 0 or more"),
        (["--score-failure", "1"], "--score-failure: got 1.0, expected a share from 0 to 0.9"),
        (["--queue-capacity", "7"], "--queue-capacity: got 7, expected at least one step's batch"),
        (["--mode", "semi"], "--mode: got 'semi', expected all or one of sync, one_step_off, async"),
        (["--landing", "stop"], "--landing: got 'stop', expected one of pause, drain"),
        (["--sweep", "--etas", "1,x"], "--etas: got '1,x', expected whole numbers"),
        (["--plot", "a.pdf"], "--plot: got a.pdf, expected a file that ends in .svg or .png"),
        (["--workload", "lognormale"], "--workload: got 'lognormale', expected one of lognormal"),
        (["--workload", "lognormal:mean=3"], "--workload lognormal: got 'mean=3', expected key=value with a key of median"),
        (["--workload", "lognormal:icc=2"], "--workload lognormal: icc: got '2', expected a number from 0 to 1"),
        (["--workload", "math:cap=much"], "--workload math: cap: got 'much', expected a number"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("text", ["5", "5\n0\n", "5\nlong\n", "5\nnan\n"])
def test_lengths_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        parse(str(tmp_path / "lengths.txt"))
