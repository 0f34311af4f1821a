"""Patch of the router for a missing Transformer Engine."""

from __future__ import annotations

from asyncmoe.platform.megatron.patch import gone, module


def install() -> None:
    """Define `te_general_gemm` as None in `moe_utils.py`, which reads it even if its import failed.

    0.16.1 imports it inside a `try`, then tests `te_general_gemm is not None` whenever `moe_router_dtype` is set: a NameError without
    Transformer Engine. 0.19 itself defines it as None.
    """
    utils = module("transformer.moe.moe_utils")
    if hasattr(utils, "te_general_gemm"):
        return
    router = getattr(utils, "RouterGatingLinearFunction", None)
    if router is None or "te_general_gemm" not in router.forward.__code__.co_names:
        raise gone("moe_utils.te_general_gemm")
    utils.te_general_gemm = None  # type: ignore[attr-defined]
