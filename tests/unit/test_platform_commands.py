"""A command to the receivers needs no pause, other weights do, and another SGLang is noticed. A real server: engine/test_overlap.py."""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncmoe.platform.sglang import commands, overlap
from asyncmoe.platform.sglang.patching import PatchTargetGone
from asyncmoe.platform.sglang.receiver_command import LOADER

WEIGHTS = "update_weights_from_tensor"


class Updater:
    """Notes its calls, and refuses weights outside an update, as SGLang's does."""

    _session: str | None = None

    def __init__(self, done: list[str]) -> None:
        self.done, self.scheduler = done, "scheduler"

    def begin_weight_update(self, request: Any) -> None:
        self.done.append("begin")
        self._session = request.selector

    def end_weight_update(self, request: Any) -> None:
        self.done.append("end")
        self._session = None

    def update_weights_from_tensor(self, request: Any) -> Any:
        self.done.append(f"write {request.load_format} {self._session}")
        return SimpleNamespace(success=self._session is not None)


class Front:
    """The HTTP process: waits for requests in progress, unless it is paused."""

    def __init__(self, paused: bool, success: bool) -> None:
        self.is_pause, self.version = paused, "old"
        self.done: list[str] = []
        self._success = success

    def auto_create_handle_loop(self) -> None:
        self.done.append("loop")

    def _update_weight_version_if_provided(self, version: str | None) -> None:
        self.version = version or self.version

    async def update_weights_from_tensor_communicator(self, request: Any) -> list[bool]:
        self.done.append(f"sent {request.serialized_named_tensors}")
        return [self._success]

    async def update_weights_from_tensor(self, request: Any, _: Any = None) -> tuple[bool, str]:
        self.done.append("waited")
        return True, ""


def module_of(**names: Any) -> ModuleType:
    module = ModuleType("patched")
    vars(module).update(names)
    return module


@pytest.fixture
def updater(monkeypatch: pytest.MonkeyPatch) -> Any:
    done: list[str] = []
    monkeypatch.setattr(overlap, "settle", lambda scheduler: done.append(f"settle {scheduler}"))
    owner: Any = type("Updater", (Updater,), {})
    named = {"BeginWeightUpdateReqInput": SimpleNamespace, "EndWeightUpdateReqInput": SimpleNamespace}
    commands._mend_scheduler(module_of(SchedulerWeightUpdaterManager=owner, **named))
    return owner(done)


def test_a_command_outside_an_update_is_one(updater: Any) -> None:
    answer = updater.update_weights_from_tensor(SimpleNamespace(load_format=LOADER, selector="all"))
    assert answer.success
    assert updater.done == ["settle scheduler", "begin", f"write {LOADER} all", "end"]


def test_a_command_within_an_update_is_a_part_of_it(updater: Any) -> None:
    updater.begin_weight_update(SimpleNamespace(selector="target"))
    updater.update_weights_from_tensor(SimpleNamespace(load_format=LOADER, selector="all"))
    assert updater.done == ["begin", f"write {LOADER} target"]


def test_weights_outside_an_update_are_refused_as_before(updater: Any) -> None:
    assert not updater.update_weights_from_tensor(SimpleNamespace(load_format=None, selector="all")).success
    assert updater.done == ["write None None"]


@pytest.mark.parametrize(
    ("paused", "success", "form", "done", "version"),
    [
        (False, True, LOADER, ["loop", "sent [b'1']"], "7"),
        (False, False, LOADER, ["loop", "sent [b'1']"], "old"),
        (True, True, LOADER, ["waited"], "old"),
        (False, True, None, ["waited"], "old"),
    ],
)
def test_only_a_command_waits_for_no_request(paused: bool, success: bool, form: str | None, done: list[str], version: str) -> None:
    owner: Any = type("Front", (Front,), {})
    merge = SimpleNamespace(merge_results=lambda results: (all(results), ""))
    named = {"normalize_serialized_named_tensor_payloads": lambda several: [one.encode() for one in several]}
    commands._mend_front(module_of(TokenizerControlMixin=owner, FanOutCommunicator=merge, **named))
    front = owner(paused, success)
    request = SimpleNamespace(load_format=form, serialized_named_tensors=["1"], weight_version="7")
    assert asyncio.run(front.update_weights_from_tensor(request)) == (success, "")
    assert (front.done, front.version) == (done, version)


def test_another_sglang_is_noticed() -> None:
    with pytest.raises(PatchTargetGone, match=r"patched\.SchedulerWeightUpdaterManager\.begin_weight_update is gone"):
        commands._mend_scheduler(module_of(SchedulerWeightUpdaterManager=type("Other", (), {WEIGHTS: print})))
    with pytest.raises(PatchTargetGone, match=r"patched\.TokenizerControlMixin\.update_weights_from_tensor is gone"):
        commands._mend_front(ModuleType("patched"))
