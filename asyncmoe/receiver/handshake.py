"""What a worker reports of its parameters, and its comparison with the layout that weights will be sent by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncmoe.models import EngineParallel
from asyncmoe.receiver.protocol import EngineRanks, Parameter, Ready
from asyncmoe.reshard import RankLayout
from asyncmoe.reshard.float8 import SCALES
from asyncmoe.reshard.layout import contiguous_strides

_NAMED = 20
"""Differences a refusal lists; the rest are counted."""


def places() -> dict[str, int]:
    """SGLang's own record of the ranks of this worker; to be read in its main thread."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return {"tp_rank": parallel.tp_rank, "moe_ep_rank": parallel.moe_ep_rank}


_RAW_BACKENDS = frozenset({"auto", "triton", "deep_gemm", "lora_triton"})
"""MoE runners that keep expert weights as they are loaded; "auto" is one of them wherever the shapes are the expected ones
(sglang 0.5.23, layers/quantization/unquant.py)."""


def obstacles(model: torch.nn.Module) -> list[str]:
    """What keeps weights written into this worker's parameters from being the weights it computes with; its main thread's to ask."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.utils import get_moe_runner_backend
    from sglang.srt.runtime_context import get_server_args

    found = []
    in_blocks = any(name.endswith(SCALES) for name, _ in model.named_parameters())
    if (quantization := get_server_args().quantization) is not None and not in_blocks:
        found.append(f"it quantises its weights ({quantization})")
    if in_blocks:
        from sglang.srt.layers import deep_gemm_wrapper

        if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
            found.append("its DeepGEMM packs the scales of float8 in another form than they are loaded in")
    backend = get_moe_runner_backend().value
    if backend not in _RAW_BACKENDS and any(name.endswith("w13_weight") for name, _ in model.named_parameters()):
        found.append(f"its MoE runner {backend} rearranges expert weights; give it --moe-runner-backend triton")
    if envs.SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.get():
        found.append("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED rearranges expert weights; unset it")
    return found


def differences(ready: Ready, engine: EngineRanks, tp_rank: int, layout: RankLayout) -> list[str]:
    """Everything in which a worker is not what the layout says, each in words; none: weights may be sent."""
    expected = {"tp_rank": tp_rank, "moe_ep_rank": EngineParallel(engine.tp, engine.ep).ep_rank(tp_rank)}
    who = f"{engine.name} rank {tp_rank}"
    wrong = [
        f"{who} is {key} {ready.places.get(key)}, expected {value}" for key, value in expected.items() if ready.places.get(key) != value
    ]
    wrong += [f"{who}: {obstacle}; or set sync.method=broadcast" for obstacle in ready.obstacles]
    wanted = {name: Parameter(storage.shape, storage.dtype, contiguous_strides(storage.shape)) for name, storage in layout.storages.items()}
    for name in sorted(wanted.keys() | ready.parameters.keys()):
        if (got := ready.parameters.get(name)) != wanted.get(name):
            wrong.append(f"{who}: {name}: got {_words(got)}, expected {_words(wanted.get(name))}")
    return wrong


def refusal(wrong: Sequence[str]) -> str:
    """One text of many differences."""
    more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return "; ".join(wrong[:_NAMED]) + more


def _words(parameter: Parameter | None) -> str:
    if parameter is None:
        return "no such parameter"
    shared = f" in the storage of {parameter.shares}" if parameter.shares else ""
    gaps = "" if parameter.stride == contiguous_strides(parameter.shape) else f" with strides {list(parameter.stride)}"
    return f"{parameter.dtype}{list(parameter.shape)}{gaps}{shared}"
