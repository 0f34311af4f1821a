"""Parallel sizes of a Megatron trainer and an SGLang engine, and a rank's position in each process grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncmoe.errors import ConfigError
from asyncmoe.reshard.layout import RankLayout


@dataclass(frozen=True)
class MegatronParallel:
    """Sizes of Megatron's process grid, and a rank's position in it.

    Ranks are numbered as in `megatron.core.parallel_state` with the default order "tp-cp-ep-dp-pp":
    tensor ranks are adjacent and pipeline stages are furthest apart. Experts use a separate grid over the ranks of a stage:
    expert-tensor ranks are adjacent, then expert ranks, then expert-data ranks.

    Attributes:
        tp, pp, dp: tensor, pipeline and data parallel sizes; the world is their product. Context-parallel ranks, between tensor and data
            parallel ones, hold the same weights and count as data-parallel ones. The configuration refuses
            inconsistent sizes.
        ep, etp: expert and expert-tensor parallel sizes; their product divides tp * dp.
        te: use the parameter names of Transformer Engine's layers (grouped experts, norms fused into the next linear layer).
        vpp: model chunks per stage (Megatron's virtual_pipeline_model_parallel_size; 1: no interleaving).
        first_layers, last_layers: layers of the first and the last stage (num_layers_in_first_pipeline_stage and
            num_layers_in_last_pipeline_stage); the other stages share the rest equally.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    te: bool = False
    vpp: int = 1
    first_layers: int | None = None
    last_layers: int | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def pp_rank(self, rank: int) -> int:
        return rank // (self.tp * self.dp)

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp

    def ep_rank(self, rank: int) -> int:
        return rank // self.etp % self.ep

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """Return the coordinates that determine a rank's parameters; ranks with equal coordinates hold equal parameters."""
        return self.tp_rank(rank), self.pp_rank(rank), self.ep_rank(rank), self.etp_rank(rank)

    def layouts(self, make: Callable[[int], RankLayout]) -> list[RankLayout]:
        """Return the layouts of all ranks from 0; each distinct one is made once, so that planning reads it once.

        Args:
            make: returns the layout of a rank.
        """
        made: dict[tuple[int, int, int, int], RankLayout] = {}
        for rank in range(self.world):
            if self.place(rank) not in made:
                made[self.place(rank)] = make(rank)
        return [made[self.place(rank)].at(rank) for rank in range(self.world)]

    def stage_layers(self, layers: int) -> list[int] | None:
        """Return the layers of each pipeline stage, or None if this division is impossible (ignoring `vpp`).

        Follows `get_num_layers_to_build` of megatron/core/transformer/transformer_block.py.
        """
        given = {stage: n for stage, n in ((0, self.first_layers), (self.pp - 1, self.last_layers)) if n is not None}
        rest, stages = layers - sum(given.values()), self.pp - len(given)
        if rest < stages or (rest % stages if stages else rest):
            return None
        return [given.get(stage, rest // stages if stages else 0) for stage in range(self.pp)]

    def chunk_layers(self, layers: int, rank: int) -> list[range]:
        """Return the layers of each model chunk of a rank; one chunk without interleaving.

        Chunks are assigned round-robin: chunk 0 of every stage, then chunk 1 of every stage (as in
        `get_transformer_layer_offset` of megatron/core/transformer/transformer_layer.py).

        Raises:
            ConfigError: this division is impossible.
        """
        counts = self.stage_layers(layers)
        if counts is None or any(count % self.vpp for count in counts):
            raise ConfigError("pipeline stages", got=f"{layers} layers over {self}", expected="sizes that divide the layers")
        each, stage = [count // self.vpp for count in counts], self.pp_rank(rank)
        first = [chunk * sum(each) + sum(each[:stage]) for chunk in range(self.vpp)]
        return [range(begin, begin + each[stage]) for begin in first]


@dataclass(frozen=True)
class EngineParallel:
    """Sizes of an SGLang engine, and a rank's position in it (sglang/srt/runtime_context.py). An engine has `tp` ranks.

    Attributes:
        tp: ranks over which everything but the experts is sharded.
        ep: experts are sharded over `ep` groups of ranks, and each expert's width over the tp / ep ranks of a group.
        attn_dp: attention and the embedding are replicated over `attn_dp` groups of ranks, each with requests and a KV cache of its own,
            and sharded over the tp / attn_dp ranks of a group.
    """

    tp: int = 1
    ep: int = 1
    attn_dp: int = 1

    @property
    def world(self) -> int:
        return self.tp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def attn_tp(self) -> int:
        return self.tp // self.attn_dp

    def attn_place(self, rank: int) -> tuple[int, int]:
        """Return the ranks over which attention is sharded, and a rank's number among them."""
        return self.attn_tp, rank % self.attn_tp

    def attn_dp_rank(self, rank: int) -> int:
        return rank // self.attn_tp

    def ep_rank(self, rank: int) -> int:
        return rank // self.moe_tp

    def moe_tp_rank(self, rank: int) -> int:
        return rank % self.moe_tp
