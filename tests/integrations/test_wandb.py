"""W&B in offline mode, read back by W&B's own reader of its files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

wandb = pytest.importorskip("wandb", reason="run: make test-integrations ONLY=wandb")

from asyncmoe.telemetry.loggers import sender, state  # noqa: E402
from asyncmoe.telemetry.loggers.wandb_backend import Wandb  # noqa: E402
from tests.integrations.logged_run import config_of, figures, recorded, write_run  # noqa: E402


def _records(run_dir: Path, kind: str) -> list[Any]:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for path in sorted((run_dir / "loggers" / "wandb").glob("offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == kind:
                found.append(getattr(record, kind))
    return found


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    return [_values(record.item) for record in _records(run_dir, "history")]


def _by_step(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for row in rows:
        axis = "evaluation/version" if "evaluation/version" in row else "step"
        names = [name for name in row if not name.startswith(("_", "rollout/")) and name != "step"]
        assert not [name for name in names if (name, row[axis]) in found], "each figure once"
        found |= {(name, row[axis]): row[name] for name in names}
    return found


def test_a_run_and_its_resume_are_one_run_with_the_figures_of_the_records(tmp_path: Path) -> None:
    run_dir = tmp_path / "löss 1"
    config_of(run_dir, wandb={"project": "p", "mode": "offline", "tags": ["a"]}, loggers={"samples": False})
    recorded(run_dir)
    sender.send(run_dir, [])
    first = _rows(run_dir)
    assert _by_step(first) == pytest.approx(figures(run_dir))
    assert any(name.startswith("rollout/") for row in first for name in row)
    time.sleep(1.1)  # W&B names its folders by the second
    assert sender.send(run_dir, ["wandb"])["wandb"].sent.points == len(first), "nothing twice"
    last = state.read(run_dir, "wandb").sent.step
    write_run(run_dir, warmup=2, rl=last + 4, first=last - 2, start=1_900_000_000.0)
    time.sleep(1.1)
    sender.send(run_dir, [])
    rows = _rows(run_dir)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, last + 7))
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert rows[: len(first)] == first
    runs = _records(run_dir, "run")
    assert {(run.run_id, run.project, run.display_name, tuple(run.tags)) for run in runs} == {
        (state.read(run_dir, "wandb").id, "p", "löss 1", ("a",))
    }
    config = _values(runs[0].config.update)
    assert (config["run"]["steps"], "python" in config["versions"]) == (8, True)
    assert {(one.glob_name, one.step_metric) for one in _records(run_dir, "metric") if one.glob_name} == {
        ("*", "step"),
        ("evaluation/*", "evaluation/version"),
    }


def test_samples_are_a_table(tmp_path: Path) -> None:
    section = config_of(tmp_path / "run", wandb={"mode": "offline"}).telemetry.wandb
    assert section is not None
    backend = Wandb(section, tmp_path / "run", "run")
    backend.open(None, 0, {})
    backend.table("samples", 3, ["question", "reward"], [("2+2=", 1.0), ("ünï\x00", None)])
    backend.close(True)
    (row,) = _rows(tmp_path / "run")
    assert row["step"] == 3
    (kept,) = (tmp_path / "run").rglob("*.table.json")
    assert json.loads(kept.read_text()) == {
        "columns": ["question", "reward"],
        "data": [["2+2=", 1.0], ["ünï\x00", None]],
    }


def test_no_source_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout with changes: W&B would keep a patch of them."""
    run_dir = tmp_path / "run"
    config_of(run_dir, wandb={"mode": "offline"})
    recorded(run_dir)
    sender.send(run_dir, [])
    kept = {path.name for path in (run_dir / "loggers").rglob("*") if path.is_file()}
    assert not [name for name in kept if name.endswith((".patch", ".py", ".ipynb"))]
