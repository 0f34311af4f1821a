"""Low-rank adapters, trained in place of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import field_validator, model_validator

from asyncmoe.config.fields import Positive, PositiveFloat, Section, refused

GROUPED = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
ATTENTION = (*GROUPED[:-1], *LATENT)
MLP = ("gate_proj", "up_proj", "down_proj")
Target = Literal[
    "q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]
"""A linear layer that can have an adapter, by Hugging Face module name. A model has only some of these layers."""
TARGETS: tuple[Target, ...] = get_args(Target)


class LoraSection(Section):
    """Adapters: y = W x + (alpha / rank) B A x for every target, with A [rank, in] and B [out, rank] trained and W frozen."""

    rank: Positive = 32
    """Rank of an adapter: rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale: B A x is multiplied by alpha / rank. A larger alpha makes larger steps at the same learning rate."""
    targets: tuple[Target, ...] | None = None
    """Linear layers with an adapter: q_proj, k_proj, v_proj, o_proj (attention); q_a_proj, kv_a_proj_with_mqa, q_b_proj, kv_b_proj, o_proj
    (latent attention); gate_proj, up_proj, down_proj (of every expert, of shared experts, and of layers without experts). null: all that
    the model has."""
    experts: Literal["per_expert", "shared_outer"] = "per_expert"
    """per_expert: every expert has its own A and B. shared_outer: the experts of a layer share the halves that face the hidden states (A of
    gate_proj and up_proj, B of down_proj), which makes the adapter two to three times smaller."""

    start: Path | None = None
    """Directory of a PEFT adapter to start from, with the same rank, alpha and targets. The reference policy is still the model without the
    adapter. null: new adapters, which change nothing at first."""

    @field_validator("targets")
    @classmethod
    def _in_order(cls, value: tuple[Target, ...] | None) -> tuple[Target, ...] | None:
        """Put the targets in the order of `TARGETS`, so that equal sets are equal configurations; refuse an empty list."""
        if value == ():
            raise refused("lora.targets", "none", "at least one target; leave the key out for all")
        return value and tuple(name for name in TARGETS if name in value)

    @model_validator(mode="after")
    def _check(self) -> LoraSection:
        if self.experts == "shared_outer" and self.targets is not None and not set(self.targets) & set(MLP):
            expected = f"per_expert because lora.targets has none of {', '.join(MLP)}; leave lora.experts out, or add a target"
            raise refused("lora.experts", "shared_outer", expected)
        return self
