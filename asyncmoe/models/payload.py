"""What is moved from a trainer to its engines: the weights of a model, or an adapter of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from asyncmoe.models.families import family_of
from asyncmoe.models.family import Family
from asyncmoe.models.lora import megatron, sglang
from asyncmoe.models.lora.adapter import Kind, halves
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.quantised import Float8, float8_of, quantised
from asyncmoe.models.shape import Shape, Shapes
from asyncmoe.reshard import RankLayout
from asyncmoe.reshard.float8 import SCALES, with_scale_tensors, with_scales


@dataclass(frozen=True)
class Payload:
    """Canonical tensors, and where they lie on either side. Of a checkpoint of float8 the weights are sent quantised: their scales are
    tensors too, beside them on either side.

    Attributes:
        hf: the model's Hugging Face configuration.
        adapter: None: the weights.

    Raises:
        UserError: a model family that is not supported.
        ConfigError: parallel sizes that do not divide the model, or a way of quantising that is not carried over.
        LayoutError: parallel sizes that cut blocks of float8.
    """

    hf: Mapping[str, Any]
    adapter: Kind | None = None

    def tensors(self) -> Shapes:
        """Canonical names and shapes."""
        if self.adapter is not None:
            return halves(self._shape, self.adapter)
        return with_scale_tensors(self._weights, quantised) if self.float8 else self._weights

    def whole(self, dtype: str) -> RankLayout:
        """All of it as one rank has it and engines take it: under Hugging Face's names, or the halves' own."""
        if self.adapter is None:
            return self._scaled([self._family.hf_layout(self.hf, dtype)], there=True)[0]
        return megatron.canonical_layout(self._shape, self.adapter, dtype)

    def glued(self) -> frozenset[str]:
        """Storages of `whole` that an engine takes only together with the one before them."""
        if self.adapter is not None:
            return frozenset()
        weights = self._family.glued(self.hf)
        return weights | {name + SCALES for name in weights} if self.float8 else weights

    def trainer(self, parallel: MegatronParallel, dtype: str) -> list[RankLayout]:
        """That of every trainer rank, from 0 on."""
        if self.adapter is None:
            return self._scaled(self._family.megatron_layouts(self.hf, parallel, dtype), there=False)
        return megatron.rank_layouts(self._shape, self.adapter, parallel, dtype)

    def weights_of_trainer(self, parallel: MegatronParallel, rank: int, dtype: str) -> RankLayout:
        """The weights of one trainer rank."""
        return self._scaled([self._family.megatron_layout(self.hf, parallel, rank, dtype)], there=False)[0]

    def weights_of_engine(self, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
        """The weights of one rank of an engine."""
        return self._scaled([self._family.sglang_layout(self.hf, parallel, rank, dtype)], there=True)[0]

    def engines(self, parallel: EngineParallel, dtype: str, count: int = 1, first: int = 0) -> list[RankLayout]:
        """That of every rank of equal engines, from `first` on: parameters, or adapter memory."""
        if self.adapter is None:
            return self._scaled(self._family.sglang_layouts(self.hf, parallel, dtype, count, first=first), there=True)
        made = [sglang.memory_layout(self._shape, self.adapter, parallel, rank, dtype) for rank in range(parallel.world)]
        return [made[at % parallel.world].at(first + at) for at in range(count * parallel.world)]

    @cached_property
    def float8(self) -> Float8 | None:
        """How the weights are quantised on their way; None where they are not, or an adapter is sent."""
        return None if self.adapter is not None else float8_of(self.hf)

    def _scaled(self, layouts: list[RankLayout], *, there: bool) -> list[RankLayout]:
        """With scales, where the weights are quantised; layouts that are one stay one.

        Args:
            there: where the weights are float8, too.
        """
        if self.float8 is None:
            return layouts
        made: dict[tuple[int, int], RankLayout] = {}
        for layout in layouts:
            key = id(layout.storages), id(layout.pieces)
            if key not in made:
                made[key] = with_scales(layout, self._weights, quantised, quantised=there)
        return [made[id(layout.storages), id(layout.pieces)].at(layout.rank) for layout in layouts]

    @cached_property
    def _weights(self) -> Shapes:
        return self._family.tensors(self.hf)

    @property
    def _family(self) -> Family:
        return family_of(self.hf)

    @property
    def _shape(self) -> Shape:
        return self._family.shape_of(self.hf)
