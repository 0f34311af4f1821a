"""Another SGLang is detected. tests/engine/test_overlap.py checks that every token has the version that sampled it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncmoe.platform.sglang import overlap


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    yield
    overlap.obstacle.cache_clear()


def test_with_another_sglang_the_schedule_is_off_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "srt" / "managers" / "scheduler.py"
    file.parent.mkdir(parents=True)
    file.write_text("class Scheduler: ...")
    overlap.obstacle.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    assert overlap.checked(["--tp", "2"]) == ["--tp", "2", "--disable-overlap-schedule"]
    assert capsys.readouterr().out.startswith("the overlap schedule is off: sglang")
    assert overlap.checked(["--disable-overlap-schedule"]) == ["--disable-overlap-schedule"]
    module: Any = ModuleType("scheduler")
    overlap._mend(module)
    assert vars(module).get("Scheduler") is None, "nothing is patched"


def test_a_step_in_flight_is_counted_once() -> None:
    """As a pause in place and a change of version have it counted before weights are written."""
    done: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: done.append(f"after {other}"))
    scheduler = SimpleNamespace(
        enable_overlap=True, disaggregation_mode=SimpleNamespace(value="null"), result_queue=[("batch", "result")],
        process_batch_result=lambda batch, result: done.append(result), forward_stream="steps",
        device_module=SimpleNamespace(current_stream=lambda: stream),
    )  # fmt: skip
    overlap.settle(scheduler)
    assert done == ["result", "after steps"]
    assert [batch.reqs for batch, _ in scheduler.result_queue] == [[]], "an entry for the step that the loop launched"
