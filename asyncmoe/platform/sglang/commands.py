"""Delivers commands for the receivers (`asyncmoe.platform.sglang.receiver_command`) to an engine's workers while it generates.

In SGLang (0.5.23), /update_weights_from_tensor must come between /begin_weight_update and /end_weight_update; and unless it comes between
/pause_generation and /continue_generation, it waits until no request is left. A command needs none of these four calls:

- Every scheduler executes requests between two forward passes. Rank 0 receives a request and broadcasts it to all ranks of the engine
  (`SchedulerRequestReceiver`), so all of them execute it before the same pass, and none continues before the barrier after it.
- The HTTP process locks requests out while weights change (`model_update_lock`). Commands do not concern that process.

So a command outside an update begins and ends an update of its own. A rank that fails in it ends the engine, as in every update.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from asyncmoe.platform.sglang import overlap
from asyncmoe.platform.sglang.patching import PatchTargetGone
from asyncmoe.platform.sglang.receiver_command import LOADER

_CALL = "update_weights_from_tensor"


def _mend_front(module: ModuleType) -> None:
    """Pass commands to the schedulers whether or not requests are in progress."""
    owner: Any = _owner(module, "TokenizerControlMixin", _CALL, "_update_weight_version_if_provided")
    original, normalized = getattr(owner, _CALL), vars(module)["normalize_serialized_named_tensor_payloads"]
    merge = vars(module)["FanOutCommunicator"].merge_results

    @wraps(original)
    async def update_weights_from_tensor(self: Any, obj: Any, request: Any = None) -> tuple[bool, str]:
        if obj.load_format != LOADER or self.is_pause:
            answer: tuple[bool, str] = await original(self, obj, request)
            return answer
        self.auto_create_handle_loop()
        obj.serialized_named_tensors = normalized(obj.serialized_named_tensors)
        success, message = merge(await self.update_weights_from_tensor_communicator(obj))
        if success:
            self._update_weight_version_if_provided(obj.weight_version)
        return success, message

    setattr(owner, _CALL, update_weights_from_tensor)


def _mend_scheduler(module: ModuleType) -> None:
    """Wrap a command outside an update in an update of its own."""
    owner: Any = _owner(module, "SchedulerWeightUpdaterManager", _CALL, "begin_weight_update", "end_weight_update", "_session")
    original, begin, end = getattr(owner, _CALL), vars(module)["BeginWeightUpdateReqInput"], vars(module)["EndWeightUpdateReqInput"]

    @wraps(original)
    def update_weights_from_tensor(self: Any, recv_req: Any) -> Any:
        if recv_req.load_format != LOADER or self._session is not None:
            return original(self, recv_req)
        overlap.settle(self.scheduler)  # as a pause does
        self.begin_weight_update(begin(selector=recv_req.selector))
        answer = original(self, recv_req)
        self.end_weight_update(end())
        return answer

    setattr(owner, _CALL, update_weights_from_tensor)


def _owner(module: ModuleType, name: str, *members: str) -> Any:
    """Return a class of a module.

    Raises:
        PatchTargetGone: the class lacks one of the members.
    """
    owner = vars(module).get(name)
    for member in members:
        if not hasattr(owner, member):
            raise PatchTargetGone(f"{module.__name__}.{name}.{member} is gone")
    return owner


PATCHES = {
    "sglang.srt.managers.tokenizer_control_mixin": _mend_front,
    "sglang.srt.managers.scheduler_components.weight_updater": _mend_scheduler,
}
