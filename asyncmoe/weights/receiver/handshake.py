"""A worker's report of its ranks and settings, and the comparison of its parameters with the expected layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncmoe.errors import ProtocolError
from asyncmoe.models.config_keys import FAMILY
from asyncmoe.reshard import RankLayout
from asyncmoe.reshard.float8 import SCALES
from asyncmoe.reshard.layout import contiguous_strides
from asyncmoe.weights.protocol import EngineRanks, Parameter, Ready, Terms

_NAMED = 20
"""Number of differences a refusal lists; the rest are only counted."""


def places() -> dict[str, int]:
    """Return this worker's ranks as SGLang records them. Call it in the worker's main thread."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return {"tp_rank": parallel.tp_rank, "moe_ep_rank": parallel.moe_ep_rank, "attn_dp_rank": parallel.attn_dp_rank}


def check_family(terms: Terms, ours: str | None) -> None:
    """Refuse terms with a family other than the one the engine was started with: a message must not choose the code that a worker imports.

    Raises:
        ProtocolError: the families differ.
    """
    if terms.hf.get(FAMILY) != ours:
        raise ProtocolError(f"the model's family: got {terms.hf.get(FAMILY)}, expected {ours}, with which the engine was started")


_RAW_BACKENDS = frozenset({"auto", "triton", "deep_gemm", "lora_triton"})
"""MoE runners that keep expert weights in the layout in which they are loaded; "auto" selects one of these for the expected shapes (sglang
0.5.23, layers/quantization/unquant.py)."""


def obstacles(model: torch.nn.Module) -> list[str]:
    """Return the settings that keep the worker from computing with its parameters exactly as they are written.

    Call it in the worker's main thread.
    """
    from sglang.srt.layers.moe.utils import get_moe_runner_backend
    from sglang.srt.runtime_context import get_server_args

    found = []
    in_blocks = any(name.endswith(SCALES) for name, _ in model.named_parameters())
    if (quantization := get_server_args().quantization) is not None and not in_blocks:
        found.append(f"it quantises its weights ({quantization})")
    if in_blocks:
        from sglang.srt.layers import deep_gemm_wrapper

        if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
            found.append("its DeepGEMM repacks float8 scales after they are loaded")
    backend = get_moe_runner_backend().value
    if backend not in _RAW_BACKENDS and any(name.endswith("w13_weight") for name, _ in model.named_parameters()):
        found.append(f"its MoE runner {backend} rearranges expert weights; give it --moe-runner-backend triton")
    return found


def differences(ready: Ready, engine: EngineRanks, tp_rank: int, layout: RankLayout) -> list[str]:
    """Return all differences between a worker and its expected layout, one line each; weights may be sent only if there are none."""
    place = engine.parallel
    expected = {"tp_rank": tp_rank, "moe_ep_rank": place.ep_rank(tp_rank), "attn_dp_rank": place.attn_dp_rank(tp_rank)}
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
    """Join the first `_NAMED` differences into one message."""
    more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return "; ".join(wrong[:_NAMED]) + more


def _words(parameter: Parameter | None) -> str:
    if parameter is None:
        return "no such parameter"
    shared = f" in the storage of {parameter.shares}" if parameter.shares else ""
    gaps = "" if parameter.stride == contiguous_strides(parameter.shape) else f" with strides {list(parameter.stride)}"
    return f"{parameter.dtype}{list(parameter.shape)}{gaps}{shared}"
