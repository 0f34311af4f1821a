"""Patches for data-parallel attention in an engine (--attn-dp-size) on a machine without CUDA; see `cpu`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_IDLE_MS = 20


def _padded(module: ModuleType) -> None:
    """Give the requests that pad a group's batch to the size of the others' one token, at the place in the cache that no request has; the
    backend lacks this number, which all others have."""
    vars(module)["TorchNativeAttnBackend"].get_cpu_graph_seq_len_fill_value = lambda self: 1


def _scattered(module: ModuleType) -> None:
    """Sum outputs of experts for all groups, and keep the own group's rows, as with deterministic inference; otherwise it takes NCCL."""
    owner = vars(module)["GroupCoordinator"]
    owner.reduce_scatterv = owner._deterministic_reduce_scatterv


def _awake(module: ModuleType) -> None:
    """Wake idle groups often (--sleep-on-idle): a group meets the others before every step, but only its own requests wake it within a
    second."""
    owner = vars(module)["IdleSleeper"]
    sleep = owner.maybe_sleep

    def maybe_sleep(self: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().attn_dp_enabled:
            self.poller.poll(_IDLE_MS)
        else:
            sleep(self)

    owner.maybe_sleep = maybe_sleep


PATCHES = {
    "sglang.srt.layers.attention.torch_native_backend": _padded,
    "sglang.srt.distributed.parallel_state": _scattered,
    "sglang.srt.managers.scheduler_components.idle_sleeper": _awake,
}
