"""Which halves of pairs a layer has, and how each is spread over the ranks.

A linear layer of Megatron's is divided by its output (column-parallel: q, k, v, what leads up from small vectors, gate, up), by its input
(row-parallel: o, down) or not at all (what leads down to small vectors), and its pair with it: the half on the divided side is divided, the
other is copied. A copy is the same on all ranks of the group, but each rank computes only part of its gradient:

- Dense layers run under sequence parallelism. A of a column-parallel layer, B of a row-parallel one and both of one that is whole see a
  rank's own rows of the sequence. Megatron adds such gradients over tensor-parallel ranks where a parameter says `sequence_parallel`.
- An expert's layers neither gather their input nor reduce their output: the token dispatcher does (`explicit_expert_comm` in
  megatron/core/tensor_parallel/layers.py). All expert-tensor-parallel ranks see the same rows; the gradient of what A puts out (column) and
  the input of B (row) are sums of which each rank has one term, and so are the gradients of A and of B. Megatron has no name for that.
- A half that the experts of a layer share is copied to every rank of the pipeline stage, and each rank has part of its gradient: Megatron
  adds them up as it does those of a norm, over data-parallel and then over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from asyncmoe.errors import ConfigError
from asyncmoe.models.lora.adapter import Kind, Place, places, sizes
from asyncmoe.models.parallel import MegatronParallel
from asyncmoe.models.shape import Shape
from asyncmoe.models.shards import shard, span

PREFIX = "adapters."
"""What the names of adapters' parameters begin with, in a model chunk."""

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
"""Where Megatron's linear layers, but those of experts, are in a layer, by `Half.linear`."""


@dataclass(frozen=True)
class Half:
    """A parameter of a rank: half of a pair, or that half of the pairs of all its experts one behind the other.

    Attributes:
        projection, side: which half of which pair.
        linear: Megatron's linear layer that it belongs to: its name, or a name made for it where there are several of one (`LINEARS`).
        whole: the shape of one pair's half, before it is divided.
        axis, parts, index: the dimension of `whole` that is divided equally, into how many, and this rank's part; None, 1, 0: a copy.
        experts: those in it, by their number in the layer; None: it is not one expert's.
        front: what its canonical name begins with within the layer, where it is not one expert's.
        expert_data: its gradient is summed over expert-data-parallel ranks, not all data-parallel ones (Megatron's `allreduce` = False).
        partial: the ranks with copies of it that each have one term of its gradient.
        counted: this rank's values count in a norm over the model; copies must count once.
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
        """Of the parameter, within the module of its linear layer."""
        return f"{self.projection}_{self.side}"

    @property
    def part(self) -> tuple[int, int]:
        """The shape of one pair's half on this rank."""
        rows, columns = (size // (self.parts if axis == self.axis else 1) for axis, size in enumerate(self.whole))
        return rows, columns

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return self.part if self.experts is None else (len(self.experts), *self.part)

    @property
    def box(self) -> tuple[slice, slice]:
        """Where a pair's half on this rank lies in the whole."""
        rows, columns = (slice(size * (self.index if axis == self.axis else 0), None) for axis, size in enumerate(self.part))
        return slice(rows.start, rows.start + self.part[0]), slice(columns.start, columns.start + self.part[1])

    @property
    def canonical(self) -> list[str]:
        """Names within the layer of the canonical halves in it, in order."""
        if self.experts is not None:
            return [f"experts.{e}.{self.projection}.{self.side}" for e in self.experts]
        return [f"{self.front}{self.projection}.{self.side}"]


def check(kind: Kind, m: Shape) -> None:
    """Refuse what cannot be an adapter of this model.

    Raises:
        ConfigError: naming the key.
    """
    if refused := [target for target in kind.targets if target not in m.adapters]:
        expected = f"some of {', '.join(m.adapters)}, which can have adapters in this model"
        raise ConfigError("lora.targets", got=", ".join(refused), expected=expected, cure="take the others out")
    if kind.experts == "shared_outer" and len(m.dense_layers) == m.layers:
        raise ConfigError("lora.experts", got="shared_outer", expected="per_expert as the model has no experts", cure="leave it out")
    for dense in sorted({layer in m.dense_layers for layer in range(m.layers)}):
        for projection in kind.targets:
            least = min(size for place in places(m, projection, dense) for size in sizes(m, projection, dense, place))
            if kind.rank > least:
                raise ConfigError(
                    "lora.rank",
                    got=kind.rank,
                    expected=f"at most {least}, the smaller side of {projection} (a pair of a higher rank says no more than the layer)",
                    cure="lower it, or take the layer out of lora.targets",
                )


def layer_halves(m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, dense: bool) -> tuple[Half, ...]:
    """The halves that a rank has of a layer, A before B, in the order of `lora.targets`.

    Raises:
        ConfigError: parallel sizes that do not divide the model.
    """
    found = ((projection, place) for projection in kind.targets for place in places(m, projection, dense))
    return tuple(half for projection, place in found for half in _pair(m, kind, parallel, rank, dense, projection, place))


def _pair(m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, dense: bool, projection: str, place: Place) -> Iterator[Half]:
    out, into = sizes(m, projection, dense, place)
    linear = (_SHARED if place == "shared" else _LINEAR)[projection]
    inputs, outputs = (1, None) if projection in _ROW_PARALLEL else (None, None) if projection in _WHOLE else (None, 0)
    a = Half(projection, "a", linear, (kind.rank, into), axis=inputs)
    b = Half(projection, "b", linear, (out, kind.rank), axis=outputs)
    for half in (a, b):
        if place != "experts":
            yield _spread(replace(half, front="shared." if place else ""), "tp", parallel.tp, parallel.tp_rank(rank))
        elif half.axis is None and kind.experts == "shared_outer":
            yield _spread(replace(half, front="experts.shared."), "tp", parallel.tp, parallel.tp_rank(rank))
        else:
            own = replace(half, experts=span(m.experts, parallel.ep, parallel.ep_rank(rank)), expert_data=parallel.ep > 1)
            yield _spread(own, "etp", parallel.etp, parallel.etp_rank(rank))


def _spread(half: Half, group: Literal["tp", "etp"], parts: int, index: int) -> Half:
    """Divided over the ranks of a group, or copied to them."""
    if half.axis is None:
        return replace(half, partial=group if parts > 1 else None, counted=index == 0)
    shard(half.whole[half.axis], parts, index)
    return replace(half, parts=parts, index=index)
