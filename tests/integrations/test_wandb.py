"""W&B in offline mode, read back by W&B's own reader of its files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

wandb = pytest.importorskip("wandb", reason="run: make test-integrations ONLY=wandb")

from tests.integrations.logged_run import by_step, config_of, figures, sent, write_run  # noqa: E402


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


def _by_step(rows: list[dict[str, Any]]) -> dict[tuple[str, int], Any]:
    axes = ("evaluation/version" if "evaluation/version" in row else "step" for row in rows)
    figures = ({name: value for name, value in row.items() if name != "step" and not name.startswith("_")} for row in rows)
    return by_step((row[axis], kept) for row, axis, kept in zip(rows, axes, figures, strict=True))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_TAGS", "a")


def test_a_run_and_its_resume_are_one_run_with_the_figures_of_the_records(tmp_path: Path) -> None:
    run_dir = tmp_path / "löss 1"
    config = config_of(run_dir, wandb={"project": "p"})
    write_run(run_dir, warmup=2, rl=8)
    state = sent(config, "wandb")
    first = _rows(run_dir)
    assert _by_step(first) == pytest.approx(figures(run_dir))
    assert any(name.startswith("rollout/") for row in first for name in row)
    write_run(run_dir, warmup=2, rl=state.sent.step + 4, first=state.sent.step - 2, start=1_900_000_000.0)
    time.sleep(1.1)  # W&B names its folders by the second
    sent(config, "wandb")
    rows = _rows(run_dir)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, state.sent.step + 7))
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert rows[: len(first)] == first
    runs = _records(run_dir, "run")
    assert {(run.run_id, run.project, run.display_name, tuple(run.tags)) for run in runs} == {(state.id, "p", "löss 1", ("a",))}
    written = _values(runs[0].config.update)
    assert (written["run"]["steps"], "python" in written["versions"]) == (8, True)
    assert {(one.glob_name, one.step_metric) for one in _records(run_dir, "metric") if one.glob_name} == {
        ("*", "step"),
        ("evaluation/*", "evaluation/version"),
    }


def test_no_source_code_is_kept(tmp_path: Path) -> None:
    """In a checkout with changes: W&B would keep a patch of them."""
    run_dir = tmp_path / "run"
    config = config_of(run_dir, wandb={})
    write_run(run_dir, warmup=2, rl=8)
    sent(config, "wandb")
    kept = {path.name for path in (run_dir / "loggers").rglob("*") if path.is_file()}
    assert not [name for name in kept if name.endswith((".patch", ".py", ".ipynb"))]
