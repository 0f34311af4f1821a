"""The halves of pairs in a layer, their sharding over the trainer's ranks, and the layouts of a rank's halves and of all of them.

A linear layer of Megatron is sharded by output (column-parallel: q, k, v, up-projections of latent attention, gate, up), by input
(row-parallel: o, down) or not at all (down-projections of latent attention), and so is its pair: the half on the sharded side is sharded,
the other is replicated. Replicas are equal on all ranks of the group, but each rank computes only part of their gradient:

- Dense layers run under sequence parallelism. A of a column-parallel layer, B of a row-parallel layer and both halves of a replicated
  layer see only a rank's rows of the sequence. Megatron sums such gradients over tensor-parallel ranks for parameters marked
  `sequence_parallel`.
- An expert's layers neither gather their input nor reduce their output, because the token dispatcher does (`explicit_expert_comm` in
  megatron/core/tensor_parallel/layers.py). All expert-tensor-parallel ranks see the same rows. The gradient of A's output (column) and
  the input of B (row) are sums with one term per rank, and so are the gradients of A and B. Megatron has no attribute for this case.
- A half shared by the experts of a layer is replicated on every rank of the pipeline stage, and each rank has part of its gradient.
  Megatron sums the parts as for a norm layer's weight, over data-parallel and then over tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from asyncmoe.errors import ConfigError
from asyncmoe.models.lora.adapter import Kind, halves, places, sizes
from asyncmoe.models.megatron import chunk_prefix
from asyncmoe.models.parallel import MegatronParallel
from asyncmoe.models.shape import Shape
from asyncmoe.models.shards import shard, span
from asyncmoe.reshard.layout import Box, LayoutBuilder, RankLayout, columns, rows, whole

PREFIX = "adapters."
"""Prefix of adapter parameter names in a model chunk."""

Side = Literal["a", "b"]
_LINEAR = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "q_a_proj": "linear_q_down_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}
_SHARED = {"gate_proj": "shared_fc1", "up_proj": "shared_fc1", "down_proj": "shared_fc2"}
_ROW_PARALLEL = ("o_proj", "down_proj")
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")

LINEARS = {
    **{name: f"self_attention.{name}" for name in _LINEAR.values() if "fc" not in name},
    **{name: f"mlp.{name}" for name in _LINEAR.values() if "fc" in name},
    **{name: f"mlp.shared_experts.{name.replace('shared', 'linear')}" for name in _SHARED.values()},
}
"""Paths within a layer of Megatron's linear layers outside the routed experts, by `Half.linear`."""


@dataclass(frozen=True)
class Half:
    """A parameter of a rank: a half of a pair, or the stacked halves of all experts of the rank.

    Attributes:
        projection, side: the linear layer, and "a" or "b".
        linear: name of its Megatron linear layer, or a made-up name if several share one (`LINEARS`).
        whole: the unsharded shape of one pair's half.
        axis, parts, index: the sharded dimension of `whole`, the number of equal shards, and this rank's shard; None, 1, 0: replicated.
        experts: numbers of the stacked experts in the layer; None: not an expert's half.
        front: prefix of the canonical name within the layer, unless the half is an expert's.
        expert_data: the gradient is summed over expert-data-parallel ranks, not all data-parallel ranks (Megatron's `allreduce` = False).
        partial: the group whose ranks hold replicas with one term of the gradient each.
        counted: whether this rank's values count in a norm over the model, in which replicas must count once.
    """

    projection: str
    side: Side
    linear: str
    whole: tuple[int, int]
    axis: int | None = None
    parts: int = 1
    index: int = 0
    experts: range | None = None
    front: Literal["", "shared.", "experts.shared."] = ""
    expert_data: bool = False
    partial: Literal["tp", "etp"] | None = None
    counted: bool = True

    @property
    def name(self) -> str:
        """Name of the parameter within the module of its linear layer."""
        return f"{self.projection}_{self.side}"

    @property
    def box(self) -> Box:
        """This rank's part of the unsharded half."""
        if self.axis is None:
            return whole(self.whole)
        return (rows, columns)[self.axis](self.whole, *shard(self.whole[self.axis], self.parts, self.index))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.box.extent if self.experts is None else (len(self.experts), *self.box.extent)

    @property
    def canonical(self) -> list[str]:
        """Names within the layer of the canonical halves in the parameter, in order."""
        if self.experts is not None:
            return [f"experts.{e}.{self.projection}.{self.side}" for e in self.experts]
        return [f"{self.front}{self.projection}.{self.side}"]


def check(kind: Kind, m: Shape) -> None:
    """Refuse a kind of adapter that does not suit the model.

    Raises:
        ConfigError: names the key.
    """
    if refused := [target for target in kind.targets if target not in m.adapters]:
        expected = f"some of {', '.join(m.adapters)}, which can have adapters in this model"
        raise ConfigError("lora.targets", got=", ".join(refused), expected=expected, hint="remove those that cannot")
    if kind.experts == "shared_outer" and len(m.dense_layers) == m.layers:
        raise ConfigError("lora.experts", got="shared_outer", expected="per_expert as the model has no experts", hint="leave it out")


def layer_halves(m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, dense: bool) -> tuple[Half, ...]:
    """Return a rank's halves of a layer, A before B, in the order of `lora.targets`.

    Raises:
        ConfigError: the parallel sizes do not divide the model.
    """
    found: list[Half] = []
    for projection, place in ((target, place) for target in kind.targets for place in places(m, target, dense)):
        out, into = sizes(m, projection, dense, place)
        linear = (_SHARED if place == "shared" else _LINEAR)[projection]
        inputs, outputs = (1, None) if projection in _ROW_PARALLEL else (None, None) if projection in _WHOLE else (None, 0)
        a = Half(projection, "a", linear, (kind.rank, into), axis=inputs)
        b = Half(projection, "b", linear, (out, kind.rank), axis=outputs)
        for half in (a, b):
            if place == "experts" and not (half.axis is None and kind.experts == "shared_outer"):
                own = replace(half, experts=span(m.experts, parallel.ep, parallel.ep_rank(rank)), expert_data=parallel.ep > 1)
                found.append(_spread(own, "etp", parallel.etp, parallel.etp_rank(rank)))
            else:
                own = replace(half, front="experts.shared." if place == "experts" else "shared." if place else "")
                found.append(_spread(own, "tp", parallel.tp, parallel.tp_rank(rank)))
    return tuple(found)


def _spread(half: Half, group: Literal["tp", "etp"], parts: int, index: int) -> Half:
    """Return the half as sharded over the ranks of a group, or replicated on them."""
    if half.axis is None:
        return replace(half, partial=group if parts > 1 else None, counted=index == 0)
    shard(half.whole[half.axis], parts, index)
    return replace(half, parts=parts, index=index)


def canonical_layout(m: Shape, kind: Kind, dtype: str) -> RankLayout:
    """Return the layout of the whole adapter on rank 0: a storage for each half, under its name."""
    builder = LayoutBuilder(0, dtype)
    for name, shape in halves(m, kind).items():
        builder.stack(name, [(name, whole(shape))])
    return builder.build()


def rank_layout(m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, dtype: str) -> RankLayout:
    """Return the layout of a trainer rank's parameters, by the names of `asyncmoe.trainer.lora.attach.parameters`.

    Raises:
        ConfigError: the parallel sizes do not divide the model.
    """
    builder = LayoutBuilder(rank, dtype)
    layer = cache(lambda dense: _layer(layer_halves(m, kind, parallel, rank, dense), rank, dtype))
    for chunk, layers in enumerate(parallel.chunk_layers(m.layers, rank)):
        front = chunk_prefix(chunk, parallel.vpp) + PREFIX
        for dense, run in m.runs(layers):
            builder.repeat(layer(dense), [(f"layers.{i}.", f"{front}{i - layers.start}.") for i in run])
    return builder.build()


def _layer(held: tuple[Half, ...], rank: int, dtype: str) -> RankLayout:
    builder = LayoutBuilder(rank, dtype)
    for half in held:
        parts = [(name, half.box, (0, 0) if half.experts is None else (at, 0, 0)) for at, name in enumerate(half.canonical)]
        builder.place(f"{half.linear}.{half.name}", half.shape, parts)
    return builder.build()
