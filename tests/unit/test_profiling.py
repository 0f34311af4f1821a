"""Profiles of chosen steps: the files written, their contents, and failures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncmoe.config import Config
from asyncmoe.trainer.profiling import Profiler, mark
from tests.configs import minimal


def _config(run_dir: Path, **telemetry: Any) -> Config:
    return minimal(run_dir, steps=3, warmup={"steps": 2}, trainer={"ranks": 2}, telemetry=telemetry)


def _run(profiler: Profiler) -> None:
    for number in range(1, 6):
        with profiler.step(number), mark("forward and backward"):
            weight = torch.ones(64, 64, requires_grad=True)
            (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]


def test_chosen_steps_of_a_chosen_rank_have_traces(tmp_path: Path) -> None:
    _run(Profiler(_config(tmp_path, profile={"steps": [2, 5], "memory": True}), rank=0))
    written = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in written] == ["step-2-rank-0.trace.json.gz", "step-5-rank-0.trace.json.gz"]
    for number, path in zip((2, 5), written, strict=True):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        whole = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
        inner, outer = whole["forward and backward"], whole[f"step {number}"]
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
        multiplied = [event for event in events if event["name"] == "aten::mm" and event.get("ph") == "X"]
        assert len(multiplied) == 3  # forward, and two gradients
        assert any(event["name"] == "[memory]" for event in events)


def test_other_ranks_and_a_run_without_profile_write_nothing(tmp_path: Path) -> None:
    _run(Profiler(_config(tmp_path, profile={"steps": [2], "ranks": [1]}), rank=0))
    _run(Profiler(_config(tmp_path), rank=0))
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("in the way")
    _run(Profiler(_config(tmp_path, profile={"steps": [1, 2]}), rank=0))
    assert caplog.text.count("training goes on") == 2
