"""The payload of a weight sync from a trainer to its engines: a model's weights or an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from asyncmoe.models.families import family_of
from asyncmoe.models.family import Family
from asyncmoe.models.lora import halves, sglang
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.lora.adapter import halves as halves_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.quantised import Float8, float8_of, quantised
from asyncmoe.models.shape import Shape, Shapes
from asyncmoe.reshard import RankLayout
from asyncmoe.reshard.float8 import SCALES, with_scale_tensors, with_scales


@dataclass(frozen=True)
class Payload:
    """Canonical tensors and their layouts on both sides. Weights of a float8 checkpoint are sent quantised; their scales are additional
    tensors next to them on both sides.

    Attributes:
        hf: the model's Hugging Face configuration.
        adapter: the adapter to send; None: the weights.

    Raises:
        UserError: unsupported model family.
        ConfigError: parallel sizes do not divide the model, or the quantisation is unsupported.
        LayoutError: parallel sizes split float8 blocks.
    """

    hf: Mapping[str, Any]
    adapter: Kind | None = None

    def tensors(self) -> Shapes:
        """Return the canonical names and shapes."""
        if self.adapter is not None:
            return halves_of(self._shape, self.adapter)
        return with_scale_tensors(self._weights, quantised) if self.float8 else self._weights

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of all tensors as sent: quantised ones in float8, with their scales."""
        return sum(storage.nbytes for storage in self.whole(dtype).storages.values())

    def whole(self, dtype: str) -> RankLayout:
        """Return the layout of the whole payload on one rank, under the names that engines accept: Hugging Face's, or the halves'."""
        if self.adapter is None:
            return self._scaled(self._family.hf_layout(self.hf, dtype), there=True)
        return halves.canonical_layout(self._shape, self.adapter, dtype)

    def glued(self) -> frozenset[str]:
        """Return the storages of `whole` that an engine accepts only together with the preceding storage."""
        if self.adapter is not None:
            return frozenset()
        weights = self._family.glued(self.hf)
        return weights | {name + SCALES for name in weights} if self.float8 else weights

    def trainer(self, parallel: MegatronParallel, dtype: str) -> list[RankLayout]:
        """Return the layout of every trainer rank, from 0."""
        if (kind := self.adapter) is None:
            return parallel.layouts(lambda rank: self.weights_of_trainer(parallel, rank, dtype))
        return parallel.layouts(lambda rank: halves.rank_layout(self._shape, kind, parallel, rank, dtype))

    def weights_of_trainer(self, parallel: MegatronParallel, rank: int, dtype: str) -> RankLayout:
        """Return the layout of one trainer rank's weights."""
        return self._scaled(self._family.megatron_layout(self.hf, parallel, rank, dtype), there=False)

    def weights_of_engine(self, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
        """Return the layout of the weights of one rank of an engine."""
        return self._scaled(self._family.sglang_layout(self.hf, parallel, rank, dtype), there=True)

    def engines(self, parallel: EngineParallel, dtype: str, count: int = 1, first: int = 0) -> list[RankLayout]:
        """Return the layout of every rank of equal engines, numbered from `first`: parameters, or adapter memory."""
        if self.adapter is None:
            one = [self.weights_of_engine(parallel, rank, dtype) for rank in range(parallel.world)]
        else:
            one = [sglang.memory_layout(self._shape, self.adapter, parallel, rank, dtype) for rank in range(parallel.world)]
        return [one[at % parallel.world].at(first + at) for at in range(count * parallel.world)]

    @cached_property
    def float8(self) -> Float8 | None:
        """The quantisation of the weights for the transfer; None if they are not quantised, or if an adapter is sent."""
        return None if self.adapter is not None else float8_of(self.hf)

    def _scaled(self, layout: RankLayout, *, there: bool) -> RankLayout:
        """Add scales to a layout if the weights are quantised.

        Args:
            there: whether the weights in this layout are float8, too.
        """
        return layout if self.float8 is None else with_scales(layout, self._weights, quantised, quantised=there)

    @cached_property
    def _weights(self) -> Shapes:
        return self._family.tensors(self.hf)

    @property
    def _family(self) -> Family:
        return family_of(self.hf)

    @property
    def _shape(self) -> Shape:
        return self._family.shape_of(self.hf)
