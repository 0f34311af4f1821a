"""A whole run over hosts with rollout workers: what was sampled goes from its worker to the trainer, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.network.hosts import Wire, missing
from benchmarks.network.whole_run import measured, table
from tests.system.runs import logs, metrics, provide
from tests.system.test_journal import WARM, check

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.skipif(bool(why := missing()), reason=why)]
STEPS = 4
OPTIONS = (
    f"run.steps={STEPS}",
    "rollout.max_new_tokens=400",
    "telemetry.samples.groups=4",
    "scoring.scorer=tests.unit.scorers:length",
)


def test_a_run_over_hosts_trains_everything_once_and_each_trajectory_travels_once(tmp_path: Path) -> None:
    """`measured` fails unless the bytes on the links are those of one copy for the tensor-parallel group."""
    run = tmp_path / "run"
    found = measured(run, provide(tmp_path / "model"), Wire(rate=1_000_000_000), OPTIONS)
    print(table(found))
    assert [record["step"] for record in metrics(run)] == list(range(1, WARM + STEPS + 1))
    check(run, STEPS, again=False)
    assert json.loads((run / "summary.json").read_text())["max_abs_logprob_diff_same_version"] < 1e-4, logs(run)
    assert found["trajectories"] == STEPS * 16
    # Keys, ages and sizes, whatever the length of a response.
    assert found["ledger_bytes_a_trajectory"] < found["payload_bytes"] / found["trajectories"] / 2
