"""The simulator against the closed-form laws, published figures, and results worked out by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.simulate import laws
from asyncmoe.simulate.compare import compare
from asyncmoe.simulate.fleet import Fleet
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.workload import Workload, parse

SIXTEEN = Plant().having(
    {
        "engines.count": 16,
        "engines.max_running": 32,
        "groups_per_step": 64,
        "group_size": 8,
        "trainer.gpus": 4,
        "trainer.step_s": 1.0,
        "max_staleness": 16,
        "steps": 80,
    }
)
"""A batch fills the slots; what is left to chance is what a batch of 512 leaves to it."""
FOUR = Plant().having(
    {"engines.count": 4, "engines.max_running": 16, "groups_per_step": 8, "group_size": 8, "trainer.step_s": 1.0, "steps": 40}
)


def balanced(plant: Plant, workload: Workload) -> Plant:
    """With a training step that lasts as long as the engines need for a batch at their full rate."""
    sync = simulate(plant.having({"steps": 40}), workload, "sync")
    return plant.having({"trainer.step_s": sync.tokens / plant.full_rate})


@pytest.mark.parametrize(
    ("workload", "ratio"),
    [
        pytest.param(workload, ratio, marks=[] if workload == {1.0: "math"}.get(ratio, "lognormal") else pytest.mark.thorough)
        for ratio in (0.4, 1.0, 1.6)
        for workload in ("lognormal", "lognormal:median=2048,sigma=1.25,cap=65536", "math", "lognormal:icc=0.9", "fixed:tokens=3000")
    ],
)
def test_within_5_percent_of_two_pools(workload: str, ratio: float) -> None:
    """Where engines are the narrower pool, where the trainer is, and where they are equal."""
    drawn = parse(workload)
    plant = balanced(SIXTEEN, drawn)
    plant = plant.having({"trainer.step_s": plant.trainer.step_s * ratio})
    found = compare(plant, drawn)
    assert found.rows["async"].efficiency == pytest.approx(1, abs=0.05)
    if ratio == 1:
        assert found.pools.engine_gpus == pytest.approx(16, abs=1), "both pools need as long, so the split is the best"
    assert found.rows["async"].outcome.lost == 0


def test_the_laws_meet() -> None:
    """The best split of one pool makes S_pools, with phases as long as their share of the pool makes them, S_max of the whole."""
    t_gen, t_train, e = 8.0, 2.0, 0.25
    f = laws.best_share(t_gen, t_train, e)
    step = max(e * t_gen / f, t_train / (1 - f))
    assert (t_gen + t_train) / step == pytest.approx(laws.s_max(t_gen / (t_gen + t_train), e)) == pytest.approx(2.5)
    assert laws.s_pools(t_gen, t_train, e) == pytest.approx(5.0)
    assert laws.s_pools(t_gen, t_train, e, sync=1, pause=3) == pytest.approx(14 / 5)


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        pytest.param("lognormal", (0.21, 0.26, 0.32), marks=pytest.mark.thorough),
        ("math", (0.32, 0.38, 0.44)),
        pytest.param("lognormal:median=2048,sigma=1.25,cap=65536", (0.08, 0.10, 0.12), marks=pytest.mark.thorough),
    ],
)
def test_cost_of_stragglers_as_an_independent_simulation_has_it(workload: str, expected: tuple[float, float, float]) -> None:
    """e of 64 engines with 16, 64 and 128 requests each, from a simulation of single engines in token steps, to its two digits."""
    for concurrency, e in zip((16, 64, 128), expected, strict=True):
        plant = Plant().having(
            {"engines.count": 64, "engines.max_running": concurrency, "groups_per_step": 8 * concurrency, "trainer.step_s": 1.0, "steps": 4}
        )
        sync = simulate(plant, parse(workload), "sync")
        assert sync.tokens / plant.full_rate / sync.wait_s == pytest.approx(e, rel=0.1)


def test_an_engine_slows_down_as_it_fills() -> None:
    """Two requests on one engine of t0 = 1 s, b0 = 2: alone a step takes 1.5 s, with two 2 s."""
    fleet: Any = Fleet(1, 2, lambda batch: 1.0 + batch / 2.0)
    fleet.place("long", 10, now=0.0)
    assert fleet.next_event() == 15.0
    fleet.place("short", 2, now=3.0)
    assert fleet.next_event() == 7.0
    assert fleet.happen()[0] == "short"
    assert fleet.next_event() == pytest.approx(7.0 + 6 * 1.5)
    assert (fleet.happen()[0], fleet.tokens, fleet.busy) == ("long", pytest.approx(12), pytest.approx(16.0))


def test_a_slow_judge_sets_the_pace_and_nothing_else() -> None:
    """2 judges of 1 s are 2 trajectories a second, though engines could do 20: engines run on until the capacity law stops them."""
    plant = FOUR.having({"scoring.seconds": 1.0, "scoring.concurrency": 2, "max_staleness": 3})
    found = simulate(plant, parse("fixed:tokens=350"))
    assert found.step_s == pytest.approx(64 / 2, rel=0.02)
    assert found.oldest_age <= 3
    assert found.ledger["started"] - found.ledger["trained"] - found.ledger["dropped"] <= 4 * 64


def test_a_pause_costs_engines_its_seconds_and_no_tokens() -> None:
    """Engines are the narrower pool, and never stop but for the pause."""
    plant = SIXTEEN.having({"trainer.step_s": 1.0, "max_staleness": 8})
    free, paused = simulate(plant, parse("math")), simulate(plant.having({"sync.pause_s": 5.0}), parse("math"))
    assert paused.step_s - free.step_s == pytest.approx(5.0, abs=0.05 * free.step_s)
    assert paused.lost == free.lost == 0


def test_one_step_off_takes_the_longer_phase_of_the_two() -> None:
    """Its law is (t_gen + t_train) / max(t_gen, t_train): the tail is still waited for."""
    found = compare(balanced(SIXTEEN, parse("math")).having({"trainer.step_s": 20.0, "steps": 30}), parse("math"))
    pools = found.pools
    assert found.rows["one_step_off"].speedup == pytest.approx((pools.t_gen + pools.t_train) / max(pools.t_gen, pools.t_train), rel=0.03)
    assert found.rows["one_step_off"].outcome.oldest_age == 1
    assert found.rows["sync"].outcome.oldest_age == 0


def test_cautions_name_each_assumption_that_does_not_hold() -> None:
    one = Plant().having({"engines.count": 1, "engines.max_running": 8, "groups_per_step": 1, "trainer.step_s": 5.0, "steps": 8})
    assert compare(one, parse("fixed:tokens=100")).cautions == ()
    keys = {"engines.count": 50, "max_staleness": 1, "groups_per_step": 32, "trainer.step_s": 5.0, "steps": 8}
    found = compare(Plant().having(keys), parse("lognormal"))
    assert found.rows["async"].outcome.lost > 0
    told = [sentence.split()[0] for sentence in found.cautions]
    assert told == ["a", "the", *(mode for mode, row in found.rows.items() if row.outcome.lost)], found.cautions


BEFORE: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "simulated.json").read_text())


@pytest.mark.parametrize("case", BEFORE, ids=lambda case: f"{case['workload']}-{case['mode']}")
def test_plants_from_before_have_the_figures_from_before(case: dict[str, Any]) -> None:
    found = asdict(simulate(Plant().having(case["plant"]), parse(case["workload"]), case["mode"]))
    counts = ("oldest_age", "ledger")
    assert {key: found[key] for key in counts} == {key: case["found"][key] for key in counts}
    figures = [key for key in case["found"] if key not in (*counts, "dropped")]
    assert {key: found[key] for key in figures} == pytest.approx({key: case["found"][key] for key in figures}, rel=1e-9, abs=1e-9)
