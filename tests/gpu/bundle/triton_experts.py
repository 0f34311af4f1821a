"""SGLang's experts as its Triton kernels where its kernel wheels are missing.

Between routing and the kernels SGLang 0.5.23 asks `sgl_kernel` for one thing only, the order in which blocks of tokens go through the
experts (`moe_align_block_size`); `align` gives it with torch's operators. On an H200 these experts differed
from SGLang's of torch's operators by at most 0.7 % of the largest (2026-11-26).
"""

from __future__ import annotations

from types import ModuleType

import torch

from asyncmoe.platform.sglang.patching import PatchTargetGone, after_import

ALIGN = "sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size"
METHOD = "sglang.srt.layers.quantization.unquant"


def install() -> None:
    """Have SGLang compute experts with its Triton kernels. Call before it is imported, in every process, where `is_cuda` says no."""
    after_import(ALIGN, _align)
    after_import(METHOD, _method)


def align(
    topk_ids: torch.Tensor,
    buckets: int,
    block: int,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    padded: torch.Tensor,
    _scratch: torch.Tensor,
    _fill: bool = True,
    ignore_invalid: bool = False,
) -> None:
    """What `sgl_kernel.moe_align_block_size` does, without waiting for the device, so that a CUDA graph can capture it.

    Choices are sorted by expert, and every expert's are filled up to whole blocks.

    Args:
        topk_ids: [tokens, k] int32 or int64, -1: an expert of another rank.
        buckets: experts + 1; bucket 0 is that of -1.
        block: rows of a block.
        tokens: out, int32 [at least the padded length]: index of a choice in `topk_ids.flatten()`, `topk_ids.numel()` where there is none.
        experts: out, int32 [blocks]: of each block, -1 for bucket 0 and beyond the last.
        padded: out, int32 [1]: how many of `tokens` are used, a multiple of `block`.

    Raises:
        NotImplementedError: the other convention, in which -1 has no bucket; unquantized experts never ask for it.
    """
    if ignore_invalid:
        raise NotImplementedError("moe_align_block_size: ignore_invalid_expert has no stand-in")
    bucket = topk_ids.flatten().long() + 1
    choices, device = bucket.numel(), bucket.device
    counts = torch.zeros(buckets, dtype=torch.int64, device=device).scatter_add_(0, bucket, torch.ones_like(bucket))
    filled = (counts + block - 1) // block * block
    ends = filled.cumsum(0)
    order = bucket.argsort(stable=True)
    sorted_bucket = bucket[order]
    rank = torch.arange(choices, device=device) - (counts.cumsum(0) - counts)[sorted_bucket]
    tokens.fill_(choices)
    tokens.scatter_(0, (ends - filled)[sorted_bucket] + rank, order.to(tokens.dtype))
    at = torch.searchsorted(ends, torch.arange(experts.numel(), device=device) * block, right=True)
    experts.copy_(torch.where(at < buckets, at - 1, -1))
    padded[:1].copy_(ends[-1:])


def _align(module: ModuleType) -> None:
    """Its name for the function of `sgl_kernel` is bound on a card only, and looked up when called."""
    if not callable(getattr(module, "moe_align_block_size", None)):
        raise PatchTargetGone(f"{module.__name__}.moe_align_block_size is gone")
    vars(module)["sgl_moe_align_block_size"] = align


def _method(module: ModuleType) -> None:
    """`forward_cuda` is what starts the Triton kernels; where `is_cuda` says no, `forward_native` is called."""
    method = getattr(module, "UnquantizedFusedMoEMethod", None)
    if not callable(getattr(method, "forward_cuda", None)) or not callable(getattr(method, "forward_native", None)):
        raise PatchTargetGone(f"{module.__name__}.UnquantizedFusedMoEMethod.forward_cuda or forward_native is gone")
    vars(module)["UnquantizedFusedMoEMethod"].forward_native = vars(module)["UnquantizedFusedMoEMethod"].forward_cuda
