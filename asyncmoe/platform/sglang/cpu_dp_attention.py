"""Patches for data-parallel attention in an engine (--attn-dp-size) on a machine without CUDA; see `cpu`."""

from __future__ import annotations

from types import ModuleType


def _padded(module: ModuleType) -> None:
    """Give the requests that pad a group's batch to the size of the others' one token, at the place in the cache that no request has; the
    backend lacks this number, which all others have."""
    vars(module)["TorchNativeAttnBackend"].get_cpu_graph_seq_len_fill_value = lambda self: 1


def _scattered(module: ModuleType) -> None:
    """Sum outputs of experts for all groups, and keep the own group's rows, as with deterministic inference; otherwise it takes NCCL."""
    owner = vars(module)["GroupCoordinator"]
    owner.reduce_scatterv = owner._deterministic_reduce_scatterv


PATCHES = {
    "sglang.srt.layers.attention.torch_native_backend": _padded,
    "sglang.srt.distributed.parallel_state": _scattered,
}
