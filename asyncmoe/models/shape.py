"""The sizes of a decoder-only model and the canonical tensors that they determine, for all families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from asyncmoe.config.lora import MLP
from asyncmoe.errors import ConfigError
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.reshard.layout import LayoutBuilder

HfConfig = Mapping[str, Any]
"""The contents of a Hugging Face `config.json`."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes by canonical tensor."""


class Attention(Protocol):
    """A kind of attention. Tensors and storages are named within a layer; every layer has the preceding norm, "attn_norm"."""

    @property
    def hf_names(self) -> Mapping[str, str]:
        """Names on disk by tensor."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Linear layers that can have an adapter, by their names in `lora.targets`."""

    def check(self, m: Shape) -> None:
        """Refuse impossible sizes.

        Raises:
            ConfigError: names the first impossible size.
        """

    def shapes(self, m: Shape) -> Shapes:
        """Return the tensors of the attention and their shapes."""

    def put_megatron(self, builder: LayoutBuilder, m: Shape, parallel: MegatronParallel) -> None:
        """Add the storages of a trainer rank, including the preceding norm, which Transformer Engine may fuse into a linear layer."""

    def put_sglang(self, builder: LayoutBuilder, m: Shape, parallel: EngineParallel) -> None:
        """Add the storages of an engine rank."""

    def transformer_arguments(self, hf: HfConfig, m: Shape) -> dict[str, Any]:
        """Return the keyword arguments of TransformerConfig."""

    def gpt_arguments(self, hf: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of GPTModel for positions."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model with any kind of attention, and gated MLPs or mixtures of experts.

    Attributes:
        layers: number of decoder layers.
        attention: the kind of attention.
        dense_width: rows of gate and up in a layer without experts.
        experts, expert_width, experts_per_token: sizes of a layer with experts; 0 in a model without experts.
        tied: whether the output layer is the embedding.
        dense_layers: layers without experts.
        shared_width: rows of gate and up of the shared experts; 0 if there are none.
        router_bias: whether routers add a bias for each expert to the scores for selection; the bias is a tensor without gradient.
        wide: tensors, by name within a layer, that are always float32.
        expert_names: names on disk of a layer's experts module, and of an expert's gate, up and down.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    dense_width: int
    dense_layers: frozenset[int]
    attention: Attention
    experts: int = 0
    expert_width: int = 0
    experts_per_token: int = 0
    shared_width: int = 0
    router_bias: bool = False
    wide: frozenset[str] = frozenset()
    expert_names: tuple[str, str, str, str] = ("mlp.experts", *MLP)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Linear layers that can have an adapter, by their names in `lora.targets`."""
        return (*self.attention.adapters, *MLP)

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.kv_heads

    def runs(self, layers: range) -> Iterator[tuple[bool, list[int]]]:
        """Yield maximal runs of layers of one kind, in order, as (whether they are dense, their numbers)."""
        for dense, run in groupby(layers, self.dense_layers.__contains__):
            yield dense, list(run)


def decoder(hf: HfConfig, attention: Attention, **others: Any) -> Shape:
    """Read the sizes from a configuration with the keys of transformers 4 or 5.

    Args:
        others: attributes of `Shape` that are not read here. Without `dense_layers`, no layer has experts.

    Raises:
        ConfigError: a key is missing.
    """
    layers = positive(hf, "num_hidden_layers")
    return Shape(
        layers=layers,
        hidden=positive(hf, "hidden_size"),
        heads=positive(hf, "num_attention_heads"),
        kv_heads=positive(hf, "num_key_value_heads"),
        head_dim=hf.get("head_dim") or positive(hf, "hidden_size") // positive(hf, "num_attention_heads"),
        vocab=positive(hf, "vocab_size"),
        tied=bool(hf.get("tie_word_embeddings")),
        dense_width=positive(hf, "intermediate_size"),
        attention=attention,
        **{"dense_layers": frozenset(range(layers)), **others},
    )


def positive(hf: HfConfig, *names: str) -> int:
    """Return the value of the first key that is present; `config_keys.misfits` has checked its type.

    Raises:
        ConfigError: no key is present.
    """
    found: list[int] = [hf[name] for name in names if hf.get(name) is not None]
    if not found:
        raise ConfigError(f"{names[0]} in config.json", got="nothing", expected="a positive number")
    return found[0]


def rope(hf: HfConfig, theta: float = 10000.0) -> dict[str, Any]:
    """Return the rotary parameters under transformers 5's names, as its `convert_rope_params_to_dict` does. Version 4 used rope_theta and
    rope_scaling, whose key rope_type was earlier called "type".

    Args:
        theta: the family's rope_theta for a configuration without one.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    found = {"rope_theta": hf.get("rope_theta", theta), "rope_type": given.get("type", "default"), **given}
    if found["rope_type"] != "default":
        found.setdefault("original_max_position_embeddings", hf.get("max_position_embeddings"))
    return found


def tensors(m: Shape) -> Shapes:
    """Return the canonical tensors and their shapes."""
    found: Shapes = {"embed": (m.vocab, m.hidden)}
    for dense, run in m.runs(range(m.layers)):
        layer = layer_shapes(m, dense)
        found |= {f"layers.{i}.{name}": shape for i in run for name, shape in layer.items()}
    found["final_norm"] = (m.hidden,)
    if not m.tied:
        found["head"] = (m.vocab, m.hidden)
    return found


def layer_shapes(m: Shape, dense: bool) -> Shapes:
    """Return the tensors of one layer, by name within the layer."""
    found: Shapes = {"attn_norm": (m.hidden,), **m.attention.shapes(m), "mlp_norm": (m.hidden,)}
    if dense:
        return found | _mlp_shapes("", m.dense_width, m.hidden)
    found["router"] = (m.experts, m.hidden)
    if m.router_bias:
        found["router_bias"] = (m.experts,)
    if m.shared_width:
        found |= _mlp_shapes("shared.", m.shared_width, m.hidden)
    for e in range(m.experts):
        found |= _mlp_shapes(f"experts.{e}.", m.expert_width, m.hidden)
    return found


def _mlp_shapes(prefix: str, width: int, hidden: int) -> Shapes:
    return {f"{prefix}gate": (width, hidden), f"{prefix}up": (width, hidden), f"{prefix}down": (hidden, width)}
