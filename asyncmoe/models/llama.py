"""Llama and models of its architecture (Llama 2 to 3.3, SmolLM2): grouped-query attention without query and key norms, a gated MLP in every
layer, embeddings tied or not. The rotary frequencies of Llama 3.1 and later are scaled ("llama3")."""

from __future__ import annotations

from asyncmoe.models.attention import Grouped
from asyncmoe.models.checks import Wanted
from asyncmoe.models.config_keys import ALL
from asyncmoe.models.family import Family
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import HfConfig, Shape, decoder, positive, rope


def _shape_of(hf: HfConfig) -> Shape:
    """Read the sizes. As in transformers, absent num_key_value_heads means one per attention head."""
    return decoder({**hf, "num_key_value_heads": hf.get("num_key_value_heads") or hf.get("num_attention_heads")}, Grouped(qk_norm=False))


def _features(hf: HfConfig) -> list[Wanted]:
    """Return the restrictions of Megatron's class: its scaling has the published constants, except for the factor
    (`RotaryEmbedding._apply_scaling`).

    Raises:
        ConfigError: the factor of scaled frequencies is missing.
    """
    turned = rope(hf)
    wanted: list[Wanted] = [
        ("mlp_bias", bool(hf.get("mlp_bias")), (False,)),
        ("rope_parameters.rope_type", turned["rope_type"], ("default", "llama3")),
    ]
    if turned["rope_type"] == "llama3":
        positive(turned, "factor")
        published = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        wanted += [(f"rope_parameters.{name}", turned.get(name), (value,)) for name, value in published.items()]
    return wanted


FAMILY = Family(
    name="llama",
    shape_of=_shape_of,
    features=_features,
    router=lambda hf: {},
    engine=EngineClass(shares_tied_head=True),
    keys={**ALL, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "mlp_bias": False},
)
