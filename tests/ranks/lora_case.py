"""The adapters that every layout is tried with, and what they are on Hugging Face's model."""

from __future__ import annotations

from typing import Any

from asyncmoe.config.lora import LoraSection

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
}
"""By name: (variant of the model, keys of the section)."""

IN_PEFT = ("attention", "dense")


def section(name: str, **changes: Any) -> LoraSection:
    return LoraSection.model_validate({**_COMMON, **ADAPTERS[name][1], **changes})
