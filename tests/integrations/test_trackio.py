"""Trackio on this machine, read back by Trackio's own API."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("trackio") is None:
    pytest.skip("run: make test-integrations ONLY=trackio", allow_module_level=True)
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")  # read when the package is imported

from tests.integrations.logged_run import by_step, config_of, figures, sent, write_run


@pytest.fixture(scope="module", autouse=True)
def _home() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ.pop("TRACKIO_DIR"))


def _rows(id: str) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("p", id)


def _by_step(rows: list[dict[str, Any]]) -> dict[tuple[str, int], Any]:
    return by_step((row["step"], {name: value for name, value in row.items() if name not in ("step", "timestamp")}) for row in rows)


def test_a_run_and_its_resume_are_one_run_with_the_figures_of_the_records(tmp_path: Path) -> None:
    import trackio

    run_dir = tmp_path / "run"
    config = config_of(run_dir, trackio={"project": "p"})
    write_run(run_dir, warmup=2, rl=8)
    state = sent(config, "trackio")
    assert state.id is not None
    assert _by_step(_rows(state.id)) == pytest.approx(figures(run_dir))
    assert any(name.startswith("rollout/") for row in _rows(state.id) for name in row)
    last = state.sent.step
    write_run(run_dir, warmup=2, rl=last + 4, first=last - 2, start=1_900_000_000.0)
    sent(config, "trackio")
    assert sorted(row["step"] for row in _rows(state.id) if "loss" in row) == list(range(1, last + 7))
    (run,) = list(trackio.Api().runs("p"))
    assert run.name == state.id
    assert (run.config["run.steps"], run.config["versions.python"]) == (8, ".".join(map(str, sys.version_info[:3])))
