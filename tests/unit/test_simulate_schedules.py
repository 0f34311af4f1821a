"""Random plants: no token is too old, no trajectory is lost, no deadlock. Also tests the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import ConfigError, InvariantBroken
from asyncmoe.queue.admission import Admission
from asyncmoe.simulate.plant import MODES, Mode, Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.state import SimulatedRun
from asyncmoe.simulate.workload import parse
from tests.unit.command_line import run_command
from tests.unit.example_counts import examples
from tests.unit.test_simulate_laws import FOUR

plants = st.fixed_dictionaries(
    {
        "engines.count": st.integers(1, 6),
        "engines.max_running": st.integers(1, 12),
        "engines.prefill_s": st.sampled_from([0.0, 0.05, 2.0]),
        "max_concurrent": st.sampled_from([None, 5]),
        "groups_per_step": st.integers(1, 6),
        "group_size": st.integers(1, 4),
        "trainer.step_s": st.sampled_from([0.5, 10.0, 60.0]),
        "sync.seconds": st.sampled_from([0.0, 3.0, 40.0]),
        "sync.pause_s": st.sampled_from([0.0, 1.0]),
        "scoring.seconds": st.sampled_from([0.0, 0.5, 5.0]),
        "scoring.sigma": st.sampled_from([0.0, 1.5]),
        "scoring.concurrency": st.sampled_from([None, 1, 8]),
        "max_staleness": st.integers(0, 5),
        "steps": st.integers(1, 60),
        "seed": st.integers(0, 1 << 20),
    }
).map(Plant().having)
modes = st.sampled_from(MODES)
workloads = st.sampled_from(["lognormal:median=300", "lognormal:median=100,sigma=2,icc=0.5", "fixed:tokens=50", "search"])


def check(plant: Plant, found: SimulatedRun) -> None:
    """Check the invariants of any run."""
    assert found.oldest_age <= plant.admission(found.mode).max_staleness == found.max_staleness
    assert max(found.ages) <= found.max_staleness
    assert sum(found.ages.values()) == pytest.approx(1)
    ledger = dict(found.ledger)
    assert ledger["trained"] == plant.steps * plant.batch
    assert ledger.pop("started") == sum(ledger.values())
    # Until the last step is served, one version less counts.
    assert ledger["running"] + ledger["queued"] + ledger["leased"] <= (found.max_staleness + 1) * plant.batch
    assert 0 <= found.trainer_idle <= 1
    assert 0 <= found.engine_idle <= 1
    assert found.engine_rate <= 1 + 1e-9


@settings(max_examples=examples(60))
@given(plant=plants, mode=modes, workload=workloads)
def test_whatever_goes_wrong_the_bound_holds_and_the_counts_add_up(plant: Plant, mode: Mode, workload: str) -> None:
    check(plant, simulate(plant, parse(workload), mode))


def test_a_policy_that_forgets_staleness_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator looks at the ages itself, it does not take the policy's word for them."""
    monkeypatch.setattr(Admission, "is_stale", lambda *_: False)
    with pytest.raises(InvariantBroken, match="trained a token of age"):
        simulate(FOUR.having({"max_staleness": 1}), parse("lognormal"))


# ---------------------------------------------------------------- the command

SMALL = ["engines.count=4", "trainer.gpus=2", "engines.max_running=8", "groups_per_step=8", "group_size=4", "trainer.step_s=5", "steps=12"]


def invoke(*arguments: str) -> str:
    found = run_command(["simulate", *arguments], catch_exceptions=False, env={"COLUMNS": "140"})
    assert found.exit_code == 0, found.output
    return found.output


def test_command_compares(tmp_path: Path) -> None:
    output = invoke(*SMALL, "--json", str(tmp_path / "a.json"))
    figures = json.loads((tmp_path / "a.json").read_text())
    assert set(figures["rows"]) == {"sync", "one_step_off", "async"}
    assert figures["rows"]["sync"]["speedup"] == 1
    assert figures["rows"]["async"]["outcome"]["step_s"] < figures["pools"]["step_s"]
    assert f"{figures['rows']['async']['speedup']:.2f}x" in output
    assert "max_staleness 4" in output
    assert "6 GPUs" in output


def test_the_example_is_a_plant_and_all_its_wrong_keys_are_named_with_their_lines(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "plant.yaml"
    assert "64 GPUs" in invoke(str(example), "steps=4", "groups_per_step=16")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(example.read_text().replace("  count: 48", "  count: 0").replace("workload: lognormal", "workload: lognormale"))
    with pytest.raises(ConfigError) as refused:
        invoke(str(wrong), "sync.pause=3")
    assert re.findall(r"wrong\.yaml(?::\d+)?: [\w.]+", str(refused.value)) == [
        "wrong.yaml:4: workload",
        "wrong.yaml:11: engines.count",
    ]
    assert re.findall(r"command line: [\w.]+", str(refused.value)) == ["command line: sync.pause"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["workload=lognormale"], "workload: got 'lognormale', expected one of lognormal"),
        (["workload=lognormal:mean=3"], "workload: got 'mean=3' of lognormal, expected key=value with one of the keys median"),
        (["no-such.yaml", "steps=3"], "no-such.yaml: got no such file"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_command(["simulate", *arguments], catch_exceptions=False)
