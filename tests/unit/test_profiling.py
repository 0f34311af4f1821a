"""Profiles of chosen steps: which are written, what is in them, what stops them."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncmoe.config import Config, parse
from asyncmoe.errors import ConfigError
from asyncmoe.trainer import profiling
from asyncmoe.trainer.profiling import Profiler, mark


def _config(run_dir: Path, **telemetry: Any) -> Config:
    return parse(
        {
            "run": {"dir": str(run_dir), "steps": 3},
            "model": {"path": "unused"},
            "task": {"kind": "arithmetic"},
            "warmup": {"steps": 2},
            "trainer": {"ranks": 2},
            "telemetry": telemetry,
        }
    )


def _run(profiler: Profiler) -> None:
    for number in range(1, 6):
        with profiler.step(number), mark("forward and backward"):
            weight = torch.ones(64, 64, requires_grad=True)
            (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]


def _trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def test_chosen_steps_of_a_chosen_rank_have_traces(tmp_path: Path) -> None:
    _run(Profiler(_config(tmp_path, profile={"steps": [2, 5], "memory": True}), rank=0))
    written = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in written] == ["step-2-rank-0.trace.json.gz", "step-5-rank-0.trace.json.gz"]
    for number, path in zip((2, 5), written, strict=True):
        events = _trace(path)
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
    assert mark("a") is mark("b"), "nothing is made for a range that nobody sees"


def test_a_trace_that_is_too_large_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, profile={"steps": [1]})
    monkeypatch.setattr(profiling, "_MOST_MB", 0)
    with caplog.at_level(logging.WARNING):
        _run(Profiler(config, rank=0))
    assert not list((tmp_path / "profile").iterdir())
    assert "more than 0: it was not kept" in caplog.text


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("in the way")
    _run(Profiler(_config(tmp_path, profile={"steps": [1, 2]}), rank=0))
    assert caplog.text.count("training goes on") == 2


def test_after_an_error_the_ranges_are_off_again(tmp_path: Path) -> None:
    profiler = Profiler(_config(tmp_path, profile={"steps": [1]}), rank=0)
    with pytest.raises(KeyError), profiler.step(1):
        raise KeyError
    assert mark("a") is mark("b")


def test_nvtx_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"telemetry\.nvtx: got true, expected false"):
        Profiler(_config(tmp_path, nvtx=True), rank=0)


def test_a_snapshot_alone_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"telemetry\.profile\.trace: got false, and this machine shows the trainer no GPU"):
        Profiler(_config(tmp_path, profile={"steps": [1], "trace": False, "memory": True}), rank=0)


def test_nvtx_ranges_are_opened_and_closed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVTX itself needs a GPU's build: here its two calls are recorded."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    monkeypatch.setattr(profiling, "_megatron_ranges", lambda: calls.append("megatron"))
    try:
        profiler = Profiler(_config(tmp_path, nvtx=True), rank=0)
        with profiler.step(1), mark("fetch"):
            pass
    finally:
        Profiler(_config(tmp_path), rank=0)
    assert calls == ["megatron", "step 1", "fetch", "pop", "pop"]


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"steps": [6]}, r"telemetry\.profile\.steps: got 6, expected at most .* = 5"),
        ({"steps": [1], "ranks": [2]}, r"telemetry\.profile\.ranks: got 2, expected less than trainer\.ranks = 2"),
        ({"steps": [1], "trace": False}, r"telemetry\.profile\.trace: got false"),
        ({"steps": []}, r"telemetry\.profile\.steps"),
        ({"steps": [0]}, r"telemetry\.profile\.steps"),
    ],
)
def test_steps_and_ranks_that_the_run_does_not_have_are_refused(tmp_path: Path, profile: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _config(tmp_path, profile=profile)
