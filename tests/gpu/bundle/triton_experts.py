"""SGLang's experts as its Triton kernels where its kernel wheels are missing: `python -m tests.gpu.bundle.triton_experts RESULT`.

Between routing and the kernels SGLang 0.5.23 asks `sgl_kernel` for one thing only, the order in which blocks of tokens go through the
experts (`moe_align_block_size`); `align` gives it with torch's operators. Run as a program it compares those kernels with SGLang's experts
of torch's operators: on a card, or without one under Triton's interpreter, which executes the same kernels on the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from asyncmoe.platform.sglang.patching import PatchTargetGone, after_import
from tests.gpu.bundle.summary import write_outcome

ALIGN = "sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size"
FUSED = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
CONFIG = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"
NATIVE = "sglang.srt.layers.moe.fused_moe_native"
METHOD = "sglang.srt.layers.quantization.unquant"
SHAPES = ((1, 8, 2, 64, 64), (5, 8, 2, 64, 64), (16, 8, 2, 64, 64), (40, 8, 3, 64, 96))
"""Tokens, experts, experts of a token, hidden, width of an expert; first those of the tiny run."""
CLOSE = 0.02
"""Largest difference over the largest magnitude: both round to bfloat16 (2^-8) between the two products, in another order. A token with one
wrong expert differs by the magnitude itself."""


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


def main() -> None:
    missing = [name for name in ("triton", "sglang") if importlib.util.find_spec(name) is None]
    if missing:
        write_outcome(Path(sys.argv[1]), {}, f"{missing[0]} is not installed")
        return
    card = torch.cuda.is_available()
    if not card and (older := _older_triton()):
        write_outcome(Path(sys.argv[1]), {}, f"no GPU here, and the interpreter of Triton {older} fails with new NumPy; 3.8's does not")
        return
    if not card:
        os.environ["TRITON_INTERPRET"] = "1"
    worst = max(difference(shape, "cuda" if card else "cpu") for shape in SHAPES)
    where = torch.cuda.get_device_name(0) if card else "Triton's interpreter"
    figures = {"device": (where, ""), "shapes": (len(SHAPES), "shapes"), "difference": (worst, "of the largest")}
    write_outcome(Path(sys.argv[1]), figures)
    if not worst <= CLOSE:
        sys.exit(f"Triton's experts: got a difference of {worst:.2e} from torch's, expected at most {CLOSE:.0e}")


def _older_triton() -> str:
    """Its version where that is before 3.8, else nothing."""
    found = version("triton")
    return found if tuple(map(int, found.split(".")[:2])) < (3, 8) else ""


def difference(shape: tuple[int, int, int, int, int], device: str) -> float:
    """Largest of Triton's experts from SGLang's of torch's operators, over the largest magnitude."""
    tokens, experts, k, hidden, width = shape
    fused, native = _fused(), importlib.import_module(NATIVE)
    random = torch.Generator().manual_seed(tokens)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter computes in NumPy, which has no bfloat16

    def made(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=random).to(device, dtype)

    x, up, down = made(tokens, hidden), made(experts, 2 * width, hidden) / hidden**0.5, made(experts, hidden, width) / width**0.5
    logits = torch.rand(tokens, experts, generator=random).to(device)
    weights, ids = logits.topk(k)
    layer = SimpleNamespace(num_experts=experts, w13_weight=up, w2_weight=down)
    expected = native.moe_forward_native(
        layer, x, native.StandardTopKOutput(weights, ids, logits), native.MoeRunnerConfig(activation="silu")
    )
    got = fused.fused_experts_impl(x.clone(), up, down, weights, ids, inplace=True, filter_expert=False)
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def _fused() -> ModuleType:
    """The module of the kernels, without a server: what it asks the server's configuration is answered as its defaults are."""
    if FUSED not in sys.modules:
        from tests.gpu.bundle import without_kernels

        without_kernels.prepare(triton=True)
        fused, config = importlib.import_module(FUSED), importlib.import_module(CONFIG)
        answers = SimpleNamespace(
            moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
            deterministic=SimpleNamespace(enable_deterministic_inference=False),
        )
        vars(fused)["get_exec"] = vars(config)["get_exec"] = lambda: answers
        if not torch.cuda.is_available():
            vars(config)["get_device_name"] = lambda: "none"  # tuned sizes are looked for by the card's name
    return sys.modules[FUSED]


if __name__ == "__main__":
    main()
