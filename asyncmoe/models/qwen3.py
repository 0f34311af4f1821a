"""Qwen3, dense: grouped-query attention with query and key norms, a gated MLP in every layer, embeddings tied or not."""

from __future__ import annotations

from asyncmoe.models.attention import Grouped
from asyncmoe.models.config_keys import ALL
from asyncmoe.models.family import Family
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import decoder

KEYS = {**ALL, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
"""Keys of Qwen3's dense and MoE classes; see `Family.keys`."""
FAMILY = Family(
    name="qwen3",
    shape_of=lambda hf: decoder(hf, Grouped()),
    features=lambda hf: [],
    router=lambda hf: {},
    engine=EngineClass(shares_tied_head=True, dp_attention=True),
    keys={**KEYS, "num_key_value_heads": 32, "head_dim": 128},
)
