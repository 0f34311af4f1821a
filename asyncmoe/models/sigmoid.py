"""The experts of DeepSeek-V3 and other families: sigmoid scores, a bias for each expert that affects only selection, routing limited to
some groups of experts, scaled routing weights, and shared experts.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); `DeepseekV3TopkRouter` of transformers; transformer/moe/moe_utils.py of megatron/core
0.16.
"""

from __future__ import annotations

from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.models.checks import Wanted, several_experts
from asyncmoe.models.shape import HfConfig, positive


def sizes(hf: HfConfig) -> dict[str, Any]:
    """Return the keyword arguments of `shape.decoder`; layers from `first_k_dense_replace` on have experts.

    Raises:
        ConfigError: a key is missing.
    """
    width = positive(hf, "moe_intermediate_size")
    return {
        "experts": positive(hf, "n_routed_experts", "num_local_experts"),
        "expert_width": width,
        "experts_per_token": positive(hf, "num_experts_per_tok"),
        "dense_layers": frozenset(range(hf.get("first_k_dense_replace") or 0)),
        "shared_width": width * (hf.get("n_shared_experts") or 0),
        "router_bias": True,
    }


def features(hf: HfConfig) -> list[Wanted]:
    """Return the restrictions of Megatron's router. It divides the chosen scores by their sum unless a single expert is chosen, and scores
    a group by its top n scores if n experts are chosen per group; transformers and SGLang always use the top two.

    Raises:
        ConfigError: unsupported numbers of layers, experts or groups.
    """
    if (dense := hf.get("first_k_dense_replace") or 0) > (layers := positive(hf, "num_hidden_layers")):
        raise ConfigError("first_k_dense_replace in config.json", got=dense, expected=f"at most num_hidden_layers = {layers}")
    groups, experts, top_k = _groups(hf), sizes(hf)["experts"], positive(hf, "num_experts_per_tok")
    if experts % groups:
        raise ConfigError("n_group in config.json", got=groups, expected=f"a divisor of n_routed_experts = {experts}")
    found: list[Wanted] = [
        several_experts(hf),
        ("norm_topk_prob", hf.get("norm_topk_prob", True), (True,)),
        ("moe_layer_freq", hf.get("moe_layer_freq", 1), (1,)),
    ]
    if groups > 1:
        found.append(("num_experts_per_tok // topk_group", top_k // positive(hf, "topk_group"), (2,)))
    return found


def arguments(hf: HfConfig) -> dict[str, Any]:
    """Return the keyword arguments of TransformerConfig for the router."""
    grouped = {"moe_router_num_groups": _groups(hf), "moe_router_group_topk": positive(hf, "topk_group")} if _groups(hf) > 1 else {}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0),
        **grouped,
    }


def _groups(hf: HfConfig) -> int:
    """Return the number of expert groups; 1, which null stands for, restricts nothing."""
    return positive({"n_group": 1, **{key: value for key, value in hf.items() if value is not None}}, "n_group")
