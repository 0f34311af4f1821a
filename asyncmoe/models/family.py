"""What a model family is: one table, from which its shapes, its three layouts and its Megatron configuration follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncmoe.models import checkpoint, checks, megatron, sglang, shape
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import HfConfig, Shape, Shapes
from asyncmoe.record import Routing
from asyncmoe.reshard.layout import RankLayout


@dataclass(frozen=True)
class Family:
    """A model family: what is its own. All else is shared, as functions of its `Shape`.

    Attributes:
        name: Hugging Face's `model_type`.
        also: other model types that are the same.
        shape_of: the sizes in a configuration; raises ConfigError where a key is missing.
        features: (key of config.json, value there, the values that are carried over), beyond those common to all families or in
            place of one of them.
        router: keyword arguments of TransformerConfig that say how tokens choose experts.
        engine: what SGLang's class for it does.
        hf_names: names on disk within a layer that are its own (see `checkpoint.hf_name`).
    """

    name: str
    shape_of: Callable[[HfConfig], Shape]
    features: Callable[[HfConfig], list[checks.Wanted]]
    router: Callable[[HfConfig], dict[str, Any]]
    engine: EngineClass
    hf_names: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def check(self, hf: HfConfig, trainer: MegatronParallel, engine: EngineParallel) -> None:
        """Refuse a model with a feature that is not carried over, and parallel sizes that do not divide it.

        Raises:
            ConfigError: the first thing that is wrong.
        """
        m = self.shape_of(hf)
        checks.check_features(self.name, m, checks.common_features(hf) + self.features(hf))
        checks.check_trainer(self.name, m, trainer)
        checks.check_engine(self.name, m, self.engine, engine)

    def tensors(self, hf: HfConfig) -> Shapes:
        """Canonical tensors and their shapes."""
        return shape.tensors(self.shape_of(hf))

    def routing(self, hf: HfConfig) -> Routing | None:
        """What the routers choose from; None for a model without experts."""
        m = self.shape_of(hf)
        layers = tuple(layer for layer in range(m.layers) if layer not in m.dense_layers)
        return Routing(m.layers, layers, m.experts_per_token, m.experts) if layers else None

    def hf_layout(self, hf: HfConfig, dtype: str) -> RankLayout:
        """The checkpoint on disk, as rank 0; storages have the names in the safetensors files."""
        return checkpoint.hf_layout(self.shape_of(hf), self.hf_names, dtype)

    def megatron_layout(self, hf: HfConfig, parallel: MegatronParallel, rank: int, dtype: str) -> RankLayout:
        """A trainer rank's parameters, by their names on that rank (`megatron.chunk_prefix` before those of several chunks)."""
        return megatron.megatron_layout(self.shape_of(hf), parallel, rank, dtype)

    def sglang_layout(self, hf: HfConfig, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
        """An engine rank's parameters, by SGLang's names."""
        return sglang.sglang_layout(self.shape_of(hf), self.engine, parallel, rank, dtype)

    def glued(self, hf: HfConfig) -> frozenset[str]:
        """Tensors on disk that an engine takes only together with the one before them."""
        m = self.shape_of(hf)
        there = [name for name in shape.tensors(m) if name.split(".", 2)[-1] in self.engine.glued]
        return frozenset(checkpoint.hf_name(m, self.hf_names, name) for name in there)

    def megatron_config(self, hf: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keyword arguments of TransformerConfig and of GPTModel that follow from the model; parallel sizes, dtypes and fusions
        are not among them."""
        m = self.shape_of(hf)
        return {**megatron.transformer_arguments(hf, m), **self.router(hf)}, megatron.gpt_arguments(hf, m)

    def megatron_layouts(self, hf: HfConfig, parallel: MegatronParallel, dtype: str) -> list[RankLayout]:
        """The layouts of all trainer ranks, from 0 on; each distinct one is made once, so planning reads it once."""
        made: dict[tuple[int, int, int, int], RankLayout] = {}
        for rank in range(parallel.world):
            if parallel.place(rank) not in made:
                made[parallel.place(rank)] = self.megatron_layout(hf, parallel, rank, dtype)
        return [made[parallel.place(rank)].at(rank) for rank in range(parallel.world)]

    def sglang_layouts(self, hf: HfConfig, parallel: EngineParallel, dtype: str, engines: int = 1, first: int = 0) -> list[RankLayout]:
        """The layouts of all ranks of equal engines, engine after engine; the ranks are numbered from `first` on."""
        one = [self.sglang_layout(hf, parallel, rank, dtype) for rank in range(parallel.world)]
        return [layout.at(first + i * parallel.world + layout.rank) for i in range(engines) for layout in one]
