"""A model family: one table that determines its shapes, its three layouts and its Megatron configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncmoe.errors import ConfigError, UserError, together
from asyncmoe.models import checkpoint, checks, config_keys, megatron, sglang, shape
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import HfConfig, Shape, Shapes
from asyncmoe.reshard.layout import RankLayout
from asyncmoe.trajectory import Routing


@dataclass(frozen=True)
class Family:
    """The properties specific to a model family. Everything else is shared code over its `Shape`.

    Attributes:
        name: Hugging Face's `model_type`.
        also: model types that are identical to `name`.
        shape_of: reads the sizes from a configuration; raises ConfigError if a key is missing.
        features: (key of config.json, its value, the supported values); adds to the features common to all families, or replaces
            one of them.
        router: keyword arguments of TransformerConfig for the routing of tokens to experts.
        engine: properties of SGLang's class for the family.
        hf_names: the family's own names on disk within a layer (see `checkpoint.hf_layout`).
        keys: keys of config.json besides the sizes, with their defaults in transformers' class for the `model_type`; a key that is neither
            here nor in `config_keys` is refused. Empty: any key is accepted.
    """

    name: str
    shape_of: Callable[[HfConfig], Shape]
    features: Callable[[HfConfig], list[checks.Wanted]]
    router: Callable[[HfConfig], dict[str, Any]]
    engine: EngineClass
    hf_names: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)

    def completed(self, hf: HfConfig) -> dict[str, Any]:
        """Return a configuration with defaults for absent keys."""
        return {**self.keys, **hf}

    def check(self, hf: HfConfig, trainer: MegatronParallel, engine: EngineParallel) -> None:
        """Refuse a model with an unsupported feature, and parallel sizes that do not divide it.

        Raises:
            ConfigError: lists the faults of the model, one per line, or names the first unsuitable size.
        """
        if found := self.faults(hf):
            raise together(found)
        m = self.shape_of(self.completed(hf))
        checks.check_trainer(self.name, m, trainer)
        checks.check_engine(self.name, m, engine, self.engine.dp_attention)

    def faults(self, hf: HfConfig) -> list[UserError]:
        """Return the faults of a model's configuration: keys that are not understood, unsupported features, contradictory sizes."""
        hf = self.completed(hf)
        found = config_keys.unknown(hf, self.keys)
        if wrong := config_keys.misfits(hf):
            return [*found, *wrong]  # values of wrong kinds allow no further checks
        wanted = ["".join(part.capitalize() for part in self.name.split("_")) + "ForCausalLM"]  # SGLang chooses its class by this name
        given = (config_keys.FAMILY not in hf and hf.get("architectures")) or wanted
        try:
            found += checks.unsupported(self.name, [("architectures", given, (wanted,)), *checks.common_features(hf), *self.features(hf)])
            checks.check_shape(self.shape_of(hf))
        except ConfigError as error:
            found.append(error)
        return found

    def tensors(self, hf: HfConfig) -> Shapes:
        """Return the canonical tensors and their shapes."""
        return shape.tensors(self.shape_of(hf))

    def routing(self, hf: HfConfig) -> Routing | None:
        """Return the layers and experts that the routers choose from; None for a model without experts."""
        m = self.shape_of(hf)
        layers = tuple(layer for layer in range(m.layers) if layer not in m.dense_layers)
        return Routing(m.layers, layers, m.experts_per_token, m.experts) if layers else None

    def hf_layout(self, hf: HfConfig, dtype: str) -> RankLayout:
        """Return the layout of the checkpoint on disk, as rank 0; storages have the names in the safetensors files."""
        return checkpoint.hf_layout(self.shape_of(hf), self.hf_names, dtype)

    def megatron_layout(self, hf: HfConfig, parallel: MegatronParallel, rank: int, dtype: str) -> RankLayout:
        """Return the layout of a trainer rank's parameters, by Megatron's names (with `megatron.chunk_prefix` for several chunks)."""
        return megatron.megatron_layout(self.shape_of(hf), parallel, rank, dtype)

    def sglang_layout(self, hf: HfConfig, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
        """Return the layout of an engine rank's parameters, by SGLang's names."""
        return sglang.sglang_layout(self.shape_of(hf), self.engine, parallel, rank, dtype)

    def glued(self, hf: HfConfig) -> frozenset[str]:
        """Return the tensors on disk that an engine accepts only together with the preceding tensor."""
        pieces = self.hf_layout(hf, "bfloat16").pieces
        return frozenset(piece.storage for piece in pieces if piece.tensor.split(".", 2)[-1] in self.engine.glued)

    def megatron_config(self, hf: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the keyword arguments of TransformerConfig and GPTModel that the model determines, without parallel sizes, dtypes
        and fusions."""
        hf = self.completed(hf)
        m = self.shape_of(hf)
        return {**megatron.transformer_arguments(hf, m), **self.router(hf)}, megatron.gpt_arguments(hf, m)
