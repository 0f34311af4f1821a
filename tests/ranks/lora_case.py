"""The adapters for testing every layout, and their form on Hugging Face's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncmoe.config.lora import LoraSection
from tests.ranks import case

_COMMON = {"rank": 4, "alpha": 10.0}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "per-expert": ("plain", {}),
    "shared-outer": ("plain", {"experts": "shared_outer"}),
    # One projection each of layers that hold several, in Megatron's model.
    "some": ("plain", {"targets": ["v_proj", "up_proj"]}),
    "experts": ("plain", {"targets": ["gate_proj", "down_proj"]}),
    # A layer without experts in the middle, and an output layer that is the embedding.
    "tied": ("tied", {"experts": "shared_outer"}),
    # These two are what PEFT can express: its pairs on experts are of gate and up together.
    "attention": ("plain", {"targets": _ATTENTION}),
    "dense": ("dense", {}),
    # Small vectors and what leads down to them and up from them; what all tokens pass; a first layer without experts.
    **{name: (name, {}) for name in case.FAMILIES},
    "deepseek shared-outer": ("deepseek", {"targets": ["q_a_proj", "kv_b_proj", "up_proj", "down_proj"], "experts": "shared_outer"}),
}
"""By name: (variant of the model, keys of the section)."""

BOTH = ("per-expert", "shared-outer")
IN_PEFT = ("attention", "dense")


def tried(sizes: Mapping[str, int]) -> list[str]:
    """Adapters that a layout is tried with. Pipeline stages do not care for targets, but for an output layer that is the embedding; and a
    model without experts cannot be spread over expert-parallel ranks."""
    wanted = ADAPTERS if sizes.get("pp", 1) == 1 else (*BOTH, "tied", *case.FAMILIES)
    return [name for name in wanted if ADAPTERS[name][0] in case.variants(sizes)]


def checks(name: str) -> tuple[str, ...]:
    """The checks of an adapter in a thorough test."""
    if name not in BOTH:
        return "packed", "distributed"
    return "packed", "recompute", "plain", "distributed", "start", "gathered", "bfloat16"


def section(name: str) -> LoraSection:
    return LoraSection.model_validate({**_COMMON, **ADAPTERS[name][1]})
