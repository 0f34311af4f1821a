"""What a model family is: shapes, three layouts, a Megatron configuration, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.reshard.layout import RankLayout

HfConfig = Mapping[str, Any]
"""The contents of a Hugging Face `config.json`."""

Shapes = dict[str, tuple[int, ...]]
"""Canonical tensors and their shapes."""


@dataclass(frozen=True)
class MegatronParallel:
    """Sizes of Megatron's process grid, and where a rank stands in it.

    Ranks are numbered as in `megatron.core.parallel_state` with the order "tp-cp-ep-dp-pp" (its default) and no context
    parallelism: tensor ranks are neighbours and pipeline stages are furthest apart. For experts the ranks of a stage are
    divided anew: expert-tensor ranks are neighbours, then expert ranks, then expert-data ranks.

    Attributes:
        tp, pp, dp: tensor, pipeline and data parallel sizes; the world is their product.
        ep, etp: expert and expert-tensor parallel sizes; their product divides tp * dp.
        te: parameter names as Transformer Engine's layers have them (grouped experts, norms fused into the next linear).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    te: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp", "dp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel size {name}", got=getattr(self, name), expected="at least 1")
        if self.tp * self.dp % (self.ep * self.etp):
            raise ConfigError(
                "ranks of a pipeline stage", got=f"tp * dp = {self.tp * self.dp}", expected=f"a multiple of ep * etp = {self.ep * self.etp}"
            )

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp % self.dp

    def pp_rank(self, rank: int) -> int:
        return rank // (self.tp * self.dp)

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp

    def ep_rank(self, rank: int) -> int:
        return rank // self.etp % self.ep

    def expert_dp_rank(self, rank: int) -> int:
        return rank % (self.tp * self.dp) // (self.etp * self.ep)

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """What a rank's parameters depend on; ranks of one place hold the same."""
        return self.tp_rank(rank), self.pp_rank(rank), self.ep_rank(rank), self.etp_rank(rank)


@dataclass(frozen=True)
class EngineParallel:
    """Sizes of an SGLang engine: `tp` ranks, of which the experts are divided over `ep` and their width over tp / ep.

    A rank's expert coordinates are ep_rank = rank // (tp / ep) and expert-tensor rank = rank % (tp / ep)
    (sglang/srt/runtime_context.py).
    """

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise ConfigError("engine's ep", got=f"ep {self.ep} with tp {self.tp}", expected="positive sizes, ep a divisor of tp")

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    def ep_rank(self, rank: int) -> int:
        return rank // self.moe_tp

    def moe_tp_rank(self, rank: int) -> int:
        return rank % self.moe_tp


@dataclass(frozen=True)
class Family:
    """A model family, as pure functions of its Hugging Face configuration.

    Attributes:
        name: Hugging Face's `model_type`.
        check: refuses a model or parallel sizes that cannot work; raises ConfigError or DataError.
        tensors: canonical tensors and shapes.
        hf_layout: (hf, dtype) -> the checkpoint on disk, as rank 0; storages have the names in the safetensors files.
        megatron_layout: (hf, parallel, rank, dtype) -> that rank's Megatron parameters, by their names on that rank.
        sglang_layout: (hf, parallel, rank, dtype) -> that engine rank's parameters, by SGLang's names.
        megatron_config: keyword arguments of TransformerConfig and of GPTModel that follow from the model; parallel sizes,
            dtypes and fusions are not among them.
    """

    name: str
    check: Callable[[HfConfig, MegatronParallel, EngineParallel], None]
    tensors: Callable[[HfConfig], Shapes]
    hf_layout: Callable[[HfConfig, str], RankLayout]
    megatron_layout: Callable[[HfConfig, MegatronParallel, int, str], RankLayout]
    sglang_layout: Callable[[HfConfig, EngineParallel, int, str], RankLayout]
    megatron_config: Callable[[HfConfig], tuple[dict[str, Any], dict[str, Any]]]

    def megatron_layouts(self, hf: HfConfig, parallel: MegatronParallel, dtype: str) -> list[RankLayout]:
        """The layouts of all trainer ranks, from 0 on; each distinct one is made once, so planning reads it once."""
        made: dict[tuple[int, int, int, int], RankLayout] = {}
        for rank in range(parallel.world):
            if parallel.place(rank) not in made:
                made[parallel.place(rank)] = self.megatron_layout(hf, parallel, rank, dtype)
        return [made[parallel.place(rank)].at(rank) for rank in range(parallel.world)]

    def sglang_layouts(self, hf: HfConfig, parallel: EngineParallel, dtype: str, engines: int = 1, first: int = 0) -> list[RankLayout]:
        """The layouts of all ranks of equal engines, engine after engine; the ranks are numbered from `first` on."""
        one = [self.sglang_layout(hf, parallel, rank, dtype) for rank in range(parallel.tp)]
        return [layout.at(first + i * parallel.tp + layout.rank) for i in range(engines) for layout in one]
