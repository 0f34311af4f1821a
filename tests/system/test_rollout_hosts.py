"""A whole run over hosts with rollout workers: samples are sent from their worker to the trainer, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.network.hosts import Wire, missing
from benchmarks.network.whole_run import measured, table
from tests.chaos import invariants
from tests.system.runs import json_lines, metrics, provide
from tests.system.trained_once import WARM, told_by_log

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.skipif(bool(why := missing()), reason=why)]
STEPS = 4
OPTIONS = (
    f"run.steps={STEPS}",
    "rollout.max_new_tokens=400",
    "scoring.scorer=tests.unit.scorers:length",
)


def test_a_run_over_hosts_trains_everything_once_and_each_trajectory_travels_once(tmp_path: Path) -> None:
    """`measured` fails unless the bytes on the links are those of one copy for the tensor-parallel group."""
    run = tmp_path / "run"
    found = measured(run, provide(tmp_path / "model"), Wire(rate=1_000_000_000), OPTIONS)
    print(table(found))
    trained_once(run)
    said = "".join(path.read_text() for path in (*tmp_path.glob("trainer-*.log"), *(run / "logs").glob("*.log")))
    assert "trainer" in said
    assert "the controller is asked instead" not in said, "no trajectory passed the controller"


def trained_once(run: Path) -> None:
    """Prove it from the records and the log."""
    told = metrics(run)
    assert [record["step"] for record in told] == list(range(1, WARM + STEPS + 1))
    rl = told[WARM:]
    assert min(record["grad_norm"] for record in rl) > 0, "every step changed the weights"
    assert {record["lineage"] for record in rl} == {0}
    assert max(record["logprob_diff_max_same_version"] or 0.0 for record in rl) < 1e-4
    known = told_by_log(run)
    assert sorted(known.leases) == list(range(WARM, WARM + STEPS))
    assert {lease.ended for lease in known.leases.values()} == {""}, "each was trained"
    groups = [group for lease in known.leases.values() if lease.terms is not None for group in lease.terms.groups]
    keys = [key for group in groups for key in group.keys]
    assert len(keys) == len({key.partition(".a")[0] for key in keys}) == 16 * STEPS
    assert {group.place.writer for group in groups} == {1, 2}, "both workers have a part in it"
    assert not list(invariants.ledger_exact(json_lines(run / "rollout.jsonl")))
