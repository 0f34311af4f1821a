"""A step in flight is counted before weights change, and another SGLang is noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncmoe.platform.sglang import overlap

SOURCE = """
def _dispatch_event_loop_once(scheduler):
    scheduler.event_loop_overlap()

class Scheduler:
    def event_loop_overlap(self):
        # a comment
        self.result_queue.popleft()

    def elsewhere(self):
        return 1
"""


class Scheduler:
    """Samples token `n` in its `n`th step, and keeps what it has counted with the version it was counted under."""

    def __init__(self) -> None:
        self.enable_overlap, self.disaggregation_mode = True, SimpleNamespace(value="null")
        self.forward_stream, self.waits_for = "forward", list[str]()
        self.device_module = SimpleNamespace(current_stream=lambda: SimpleNamespace(wait_stream=self.waits_for.append))
        self.result_queue: deque[Any] = deque()
        self.version, self.counted, self.paused, self.steps = "old", list[tuple[int, str]](), "", 0

    def launch(self) -> None:
        self.steps += 1
        self.result_queue.append((SimpleNamespace(reqs=["a request"]), self.steps))

    def process_batch_result(self, batch: Any, result: int) -> None:
        self.counted.append((result, self.version))

    def pause_generation(self, request: Any) -> None:
        self.paused = request.mode

    def record_weight_version_change(self, new_version: str | None) -> None:
        self.version = new_version or self.version


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(overlap, "obstacle", lambda: "")
    module: Any = ModuleType("scheduler")
    module.Scheduler = type("Scheduler", (Scheduler,), {})
    overlap._mend(module)
    made: Scheduler = module.Scheduler()
    return made


@pytest.fixture
def asked_anew() -> Iterator[None]:
    overlap.obstacle.cache_clear()
    yield
    overlap.obstacle.cache_clear()


def test_a_pause_in_place_counts_the_step_in_flight_once(scheduler: Scheduler) -> None:
    scheduler.launch()
    scheduler.pause_generation(SimpleNamespace(mode="in_place"))
    assert (scheduler.counted, scheduler.paused) == ([(1, "old")], "in_place")
    scheduler.record_weight_version_change(new_version="new")
    scheduler.launch()
    # As `event_loop_overlap` does: every step it launched has an entry of its own, and one more is left when it looks.
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    assert scheduler.counted == [(1, "old")]
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    assert scheduler.counted == [(1, "old"), (2, "new")]


def test_a_settled_step_names_no_request(scheduler: Scheduler) -> None:
    """`_reqs_finishing_inflight` would leave out a request that has one token to go, for ever."""
    scheduler.launch()
    for _ in range(2):
        scheduler.pause_generation(SimpleNamespace(mode="in_place"))
        assert [batch.reqs for batch, _ in scheduler.result_queue] == [[]]


def test_a_version_that_changes_without_a_pause_counts_it_too(scheduler: Scheduler) -> None:
    scheduler.launch()
    scheduler.record_weight_version_change(None)
    assert scheduler.counted == []
    scheduler.record_weight_version_change("new")
    assert scheduler.counted == [(1, "old")]


def test_a_pause_that_retracts_is_left_to_sglang_which_counts_it_itself(scheduler: Scheduler) -> None:
    scheduler.launch()
    scheduler.pause_generation(SimpleNamespace(mode="retract"))
    assert (scheduler.counted, len(scheduler.result_queue)) == ([], 1)


def test_other_schedules_are_left_alone(scheduler: Scheduler) -> None:
    scheduler.launch()
    for enabled, mode in ((False, "null"), (True, "prefill")):
        scheduler.enable_overlap, scheduler.disaggregation_mode = enabled, SimpleNamespace(value=mode)
        scheduler.pause_generation(SimpleNamespace(mode="in_place"))
        assert (scheduler.counted, len(scheduler.result_queue)) == ([], 1)


@pytest.mark.parametrize("counted", [False, True])
def test_what_writes_weights_comes_after_the_steps(scheduler: Scheduler, counted: bool) -> None:
    """Also when the queue is empty: on a GPU a step whose result has been looked at may still do something."""
    if not counted:
        scheduler.launch()
    scheduler.pause_generation(SimpleNamespace(mode="in_place"))
    assert scheduler.waits_for == ["forward"]


def test_comments_and_indentation_are_no_difference() -> None:
    known = overlap.fingerprints(SOURCE)
    assert sorted(known) == ["Scheduler.event_loop_overlap", "_dispatch_event_loop_once"]
    assert overlap.differences(overlap.fingerprints(SOURCE.replace("# a comment", "# another\n")), known) == []
    changed = SOURCE.replace("popleft", "pop").replace("return 1", "return self.result_queue")
    assert overlap.differences(overlap.fingerprints(changed), known) == ["Scheduler.elsewhere", "Scheduler.event_loop_overlap"]
    assert overlap.differences({}, known) == sorted(known)


def test_without_sglang_there_is_an_obstacle(asked_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert overlap.obstacle() == "sglang: got no installed package"


def test_with_another_sglang_the_schedule_is_off_and_the_log_says_so(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "srt" / "managers" / "scheduler.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    assert overlap.checked(["--tp", "2"]) == ["--tp", "2", "--disable-overlap-schedule"]
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.startswith("the overlap schedule is off: sglang's scheduler.py differs from 0.5.23's in Scheduler._advance")
    assert "Scheduler.pause_generation" in said
    assert overlap.checked(["--disable-overlap-schedule"]) == ["--disable-overlap-schedule"]
    assert capsys.readouterr().out == ""
    module: Any = ModuleType("scheduler")
    module.Scheduler = type("Scheduler", (Scheduler,), {})
    overlap._mend(module)
    assert module.Scheduler.pause_generation is Scheduler.pause_generation
