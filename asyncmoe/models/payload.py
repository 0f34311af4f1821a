"""What is moved from a trainer to its engines: the weights of a model, or an adapter of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.models import family_of
from asyncmoe.models.family import Family
from asyncmoe.models.lora import megatron, sglang
from asyncmoe.models.lora.adapter import Kind, halves
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.shape import Shape, Shapes
from asyncmoe.reshard import RankLayout


@dataclass(frozen=True)
class Payload:
    """Canonical tensors, and where they lie on either side.

    Attributes:
        hf: the model's Hugging Face configuration.
        adapter: None: the weights.

    Raises:
        UserError: a model family that is not supported.
        ConfigError: parallel sizes that do not divide the model.
    """

    hf: Mapping[str, Any]
    adapter: Kind | None = None

    def tensors(self) -> Shapes:
        """Canonical names and shapes."""
        return self._family.tensors(self.hf) if self.adapter is None else halves(self._shape, self.adapter)

    def whole(self, dtype: str) -> RankLayout:
        """All of it as one rank has it: under Hugging Face's names, or the halves' own."""
        if self.adapter is None:
            return self._family.hf_layout(self.hf, dtype)
        return megatron.canonical_layout(self._shape, self.adapter, dtype)

    def glued(self) -> frozenset[str]:
        """Storages of `whole` that an engine takes only together with the one before them."""
        return self._family.glued(self.hf) if self.adapter is None else frozenset()

    def trainer(self, parallel: MegatronParallel, dtype: str) -> list[RankLayout]:
        """That of every trainer rank, from 0 on."""
        if self.adapter is None:
            return self._family.megatron_layouts(self.hf, parallel, dtype)
        return megatron.rank_layouts(self._shape, self.adapter, parallel, dtype)

    def engines(self, parallel: EngineParallel, dtype: str, count: int = 1, first: int = 0) -> list[RankLayout]:
        """That of every rank of equal engines, from `first` on: parameters, or adapter memory."""
        if self.adapter is None:
            return self._family.sglang_layouts(self.hf, parallel, dtype, count, first=first)
        made = [sglang.memory_layout(self._shape, self.adapter, parallel, rank, dtype) for rank in range(parallel.world)]
        return [made[at % parallel.world].at(first + at) for at in range(count * parallel.world)]

    @property
    def _family(self) -> Family:
        return family_of(self.hf)

    @property
    def _shape(self) -> Shape:
        return self._family.shape_of(self.hf)
