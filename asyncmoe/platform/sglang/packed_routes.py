"""Packs the routes of a response in the scheduler, before they leave it.

SGLang 0.5.23 sends every layer's experts as int32, in base64 (`Scheduler`'s `BatchResultProcessor._maybe_collect_routed_experts` and
`TokenizerManager._handle_batch_output`): 2,048 bytes a token with 8 experts in each of 48 layers. Packed they are 336, and 448 in base64.
Routes that do not fit the model are sent as they are, so that the reader refuses and names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.platform.sglang.patching import PatchTargetGone, after_import
from asyncmoe.trajectory import Routing, encode_routes
from asyncmoe.trajectory.sent_routes import ROUTING_VARIABLE, routing_in, to_bytes

MODULE = "sglang.srt.managers.scheduler_components.batch_result_processor"


def install() -> None:
    """Make the scheduler pack routes, if `ROUTING_VARIABLE` is set. Call it in every process before the import."""
    if text := os.environ.get(ROUTING_VARIABLE):
        routing = routing_in(text)
        after_import(MODULE, lambda module: _mend(module, routing))


def packed(routes: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the bytes of `to_bytes`, uint8[n]; routes that do not fit are returned as they are.

    Args:
        routes: int32[rows, all_layers, top_k], on the host.
    """
    if routes.dtype != torch.int32 or tuple(routes.shape[1:]) != (routing.all_layers, routing.top_k):
        return routes
    try:
        made = encode_routes(routes.numpy(), routing, "a response")
    except TrajectoryRejected:
        return routes
    return torch.frombuffer(bytearray(to_bytes(made)), dtype=torch.uint8)


def _mend(module: ModuleType, routing: Routing) -> None:
    found = [one for one in vars(module).values() if isinstance(one, type) and hasattr(one, "_maybe_collect_routed_experts")]
    if len(found) != 1:
        raise PatchTargetGone(f"{module.__name__}: got {len(found)} classes with _maybe_collect_routed_experts, expected one")
    owner: Any = found[0]
    collect: Callable[..., None] = owner._maybe_collect_routed_experts

    @wraps(collect)
    def collect_packed(self: Any, req: Any) -> None:
        before = req.routed_experts
        collect(self, req)
        if req.routed_experts is not None and req.routed_experts is not before:
            req.routed_experts = packed(req.routed_experts, routing)

    owner._maybe_collect_routed_experts = collect_packed
