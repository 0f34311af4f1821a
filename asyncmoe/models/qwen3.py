"""Qwen3, dense: grouped-query attention with query and key norms, a gated MLP in every layer, embeddings tied or not."""

from __future__ import annotations

from asyncmoe.models.attention import Grouped
from asyncmoe.models.family import Family
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import decoder

FAMILY = Family(
    name="qwen3",
    shape_of=lambda hf: decoder(hf, Grouped()),
    features=lambda hf: [],
    router=lambda hf: {},
    engine=EngineClass(shares_tied_head=True, head_on_every_stage=False),
)
