"""Records: round trips; torn, broken and superseded lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncmoe.errors import DataError
from asyncmoe.telemetry.records import JsonLines, Tail, read_steps, sessions
from asyncmoe.telemetry.report.run_page import page_of
from asyncmoe.telemetry.schema import Resume, Step


def _steps(path: Path, *steps: int, loss: float = 0.0) -> None:
    with JsonLines(path) as lines:
        for step in steps:
            lines.write(Step(step=step, phase="rl", time=float(step), loss=loss))


def test_numpy_scalars_int_keys_and_non_finite_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write(
            {"step": np.int64(3), "phase": "rl", "time": 1.5, "loss": float("nan"), "lr": np.float64(0.25), "grad_norm": np.float32("inf")}
            | {"ages": {0: 5, np.int64(1): np.int32(2)}, "unknown": [1], "plugin_metrics": {"loss/a": float("nan"), "loss/b": 2.0}}
        )
    assert read_steps(path) == [
        Step(step=3, phase="rl", time=1.5, lr=0.25, ages={0: 5, 1: 2}, plugin_metrics={"loss/a": None, "loss/b": 2.0})
    ]
    assert b"NaN" not in path.read_bytes()


def test_torn_last_line_is_ignored_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _steps(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "pha')
    assert [step.step for step in read_steps(path)] == [1, 2]
    _steps(path, 3)
    assert [step.step for step in read_steps(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    "broken", [b'{"step": 2, "pha', b"[1]", b"", b'{"step": "two", "phase": "rl", "time": 2}', b'{"step": 2, "time": 2}']
)
def test_any_other_broken_line_names_file_and_line(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "phase": "rl", "time": 1}\n' + broken + b"\n" + b'{"step": 3, "phase": "rl", "time": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2: got .*expected a"):
        read_steps(path)


def test_resume_supersedes_later_steps_even_before_it_has_made_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _steps(path, 1, 2, 3, 4, 5, loss=1.0)
    with JsonLines(path) as lines:
        lines.write(Resume(3))
    assert [step.step for step in read_steps(path)] == [1, 2, 3]
    _steps(path, 4, loss=2.0)
    assert [(step.step, step.loss) for step in read_steps(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert [[step.step for step in session] for session in sessions(Tail(path).poll_steps())] == [[1, 2, 3], [4]]


def test_going_back_without_a_mark_supersedes_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _steps(path, 1, 2, 3, 4, 5, loss=1.0)
    _steps(path, 3, 4, loss=2.0)
    _steps(path, 2, loss=3.0)
    assert [(step.step, step.loss) for step in read_steps(path)] == [(1, 1.0), (2, 3.0)]
    assert [[step.step for step in session] for session in sessions(Tail(path).poll_steps())] == [[1], [2]]


def test_tail_gives_each_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = Tail(path)
    assert tail.poll_as(dict[str, Any]) == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"a": 1}\n{"a"')
        assert tail.poll_as(dict[str, Any]) == [{"a": 1}]
        assert tail.poll_as(dict[str, Any]) == []
        file.write(b": 2}\nbroken\n")
    with pytest.raises(DataError, match="line 3"):
        tail.poll_as(dict[str, Any])


def test_a_run_of_the_version_before_is_read(tmp_path: Path) -> None:
    """Its records have fields that are gone, and its samples end with a line of their own once they are full."""
    step = {"step": 1, "phase": "rl", "time": 2.0, "step_seconds": 1.0, "replay_drift": 0.1, "ratio_quantiles": {"0.5": 1.0}}
    rollout = {"time": 1.5, "probed_tokens": 3, "scoring": {"scorer": {"scored": 2, "breaker": "closed"}}}
    begin = {"record": "begin", "time": 0.0, "step": 0, "format": 1, "kept": True}
    group = {"record": "group", "time": 1.0, "group": 0, "fate": "queued", "version": 0, "question": "1+1=", "answer": "2"}
    full = {"record": "full", "time": 3.0, "bound": 9}
    for name, records in (("metrics", [step]), ("rollout", [rollout]), ("samples/rollout", [begin, group, full])):
        with JsonLines(tmp_path / f"{name}.jsonl") as lines:
            for record in records:
                lines.write(record)
    page, (groups,) = page_of([tmp_path], samples=True)
    assert page.runs[0].what.startswith("1 RL steps")
    assert len(groups) == 1
