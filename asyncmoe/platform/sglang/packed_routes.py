"""Packs the routes of a response in the scheduler.

SGLang 0.5.23 sends every layer's experts as int32, in base64 (`SchedulerBatchResultProcessor._maybe_collect_routed_experts`, then
`TokenizerManager`): 2,048 bytes per token with 8 experts in each of 48 layers. Packed, they take 336 bytes, or 448 in base64.

Every rank's scheduler finishes a response, but only one of them sends it (`Scheduler.init_ipc_channels`; with data-parallel attention one
for each group). The others do not collect its routes at all: reading them from host memory takes as long as packing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.platform.sglang.patching import after_import

if TYPE_CHECKING:
    import torch

    from asyncmoe.trajectory import Routing

MODULE = "sglang.srt.managers.scheduler_components.batch_result_processor"
ROUTING_VARIABLE = "ASYNCMOE_ROUTING"
"""Environment variable of an engine whose routes are kept: its model's `asyncmoe.trajectory.Routing`, as JSON."""


def install() -> None:
    """Make the scheduler pack routes, if `ROUTING_VARIABLE` is set. Call it in every process before the import of SGLang."""
    if text := os.environ.get(ROUTING_VARIABLE):
        from asyncmoe.trajectory import Routing

        routing = msgspec.json.decode(text, type=Routing)
        after_import(MODULE, lambda module: _mend(module, routing))


def packed(routes: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the bytes of `to_bytes`, uint8[n]; for routes that do not fit, a text that says why, with which the reader rejects them.

    Args:
        routes: int32[rows, all_layers, top_k], on the host.
    """
    import torch

    from asyncmoe.trajectory import encode_routes
    from asyncmoe.trajectory.sent_routes import to_bytes

    try:
        sent = to_bytes(encode_routes(routes.numpy(), routing, "a response"))
    except TrajectoryRejected as rejected:
        sent = str(rejected).encode()
    return torch.frombuffer(bytearray(sent), dtype=torch.uint8)


def _mend(module: ModuleType, routing: Routing) -> None:
    owner: Any = vars(module)["SchedulerBatchResultProcessor"]
    collect: Callable[..., None] = owner._maybe_collect_routed_experts

    @wraps(collect)
    def collect_packed(self: Any, req: Any) -> None:
        if self.output_streamer.send_to_detokenizer.socket is None:
            return
        before = req.routed_experts
        collect(self, req)
        if req.routed_experts is not None and req.routed_experts is not before:
            req.routed_experts = packed(req.routed_experts, routing)

    owner._maybe_collect_routed_experts = collect_packed
