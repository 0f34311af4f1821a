"""Modules that hold pairs and add them to a layer's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from asyncmoe.models.lora.halves import Half
from asyncmoe.platform import megatron
from asyncmoe.trainer.lora.values import initial

megatron.prepare()

from megatron.core import parallel_state as groups  # noqa: E402  only after the platform is prepared
from megatron.core.tensor_parallel import (  # noqa: E402
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from asyncmoe.platform.megatron.grouped_experts import multiply  # noqa: E402

Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""([..., rows of a projection] for each projection of a fused layer) -> [..., rows of the layer]."""


Times = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, weight) -> output rows."""


def _times(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows @ weight.t()


@dataclass(frozen=True)
class Fused:
    """A fused linear layer of Megatron as separate projections.

    Attributes:
        outputs: rows of each projection on this rank, by name, in Megatron's order.
        join: combines the projections into the layer's rows.
    """

    outputs: Mapping[str, int]
    join: Join


def qkv(groups_here: int, heads_per_group: int, head_dim: int) -> Fused:
    """linear_qkv: the query heads, key head and value head of each query group."""

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.view(*part.shape[:-1], groups_here, -1) for part in parts], dim=-1).flatten(-2)

    rows = groups_here * head_dim
    return Fused({"q_proj": rows * heads_per_group, "k_proj": rows, "v_proj": rows}, join)


def gate_up(width: int) -> Fused:
    """linear_fc1 of a gated MLP: gate, then up."""
    return Fused({"gate_proj": width, "up_proj": width}, lambda parts: torch.cat(list(parts), dim=-1))


def single(projection: str, rows: int) -> Fused:
    """A layer with a single projection."""
    return Fused({projection: rows}, lambda parts: parts[0])


class Pairs(torch.nn.Module):
    """The pairs of one linear layer; for an expert layer, the pairs of all the rank's experts.

    Args:
        halves: the halves of the pairs; each becomes a parameter of the same name.
        layer: number of the layer in the model.
    """

    def __init__(self, halves: Sequence[Half], fused: Fused, layer: int, scale: float, seed: int) -> None:
        super().__init__()
        self.halves = {half.name: half for half in halves}
        self.fused, self.layer, self.scale = fused, layer, scale
        for half in halves:
            self.register_parameter(half.name, torch.nn.Parameter(initial(half, layer, seed)))
        self.projections = [name for name in fused.outputs if f"{name}_a" in self.halves]

    def deltas(self) -> Iterator[torch.Tensor]:
        """Yield the pairs' contribution to the layer's weight, [rows, in] on this rank; for experts, one per expert."""
        raise NotImplementedError

    def output(self, hidden: torch.Tensor, b: Sequence[torch.Tensor], times: Times = _times) -> torch.Tensor:
        """Return the pairs' output on this rank, [..., rows], from hidden [..., sum of the projections' ranks], one projection after
        another."""
        made = dict(zip(self.projections, torch.split(hidden, [half.shape[-1] for half in b], dim=-1), strict=True))
        with_b = dict(zip(self.projections, b, strict=True))
        parts = [
            times(made[name], with_b[name]) if name in made else hidden.new_zeros((*hidden.shape[:-1], rows))
            for name, rows in self.fused.outputs.items()
        ]
        return self.fused.join(parts)

    def _of(self, side: str) -> list[torch.Tensor]:
        return [self.get_parameter(f"{name}_{side}") for name in self.projections]


class DensePairs(Pairs):
    """The pairs of a layer that is divided over tensor-parallel ranks, or whole on each. With several ranks, sequence parallelism is on."""

    def add(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Add the pairs' output for `x` to `output`, the layer's own input and output on this rank."""
        axes = {half.axis for half in self.halves.values()}
        hidden = self.scale * (x @ torch.cat(self._of("a")).t())
        group: dist.ProcessGroup = groups.get_tensor_model_parallel_group()
        if group.size() > 1 and axes != {None}:
            # Only the adapter's `rank` columns travel between the ranks, not the layer's columns.
            move = reduce_scatter_to_sequence_parallel_region if 1 in axes else gather_from_sequence_parallel_region
            hidden = move(hidden, group=group)
        return output + self.output(hidden, self._of("b"))

    def deltas(self) -> Iterator[torch.Tensor]:
        yield self.output(self.scale * torch.cat(self._of("a")).t(), self._of("b")).t()


class ExpertPairs(Pairs):
    """The pairs of a rank's experts. Inputs and outputs are not exchanged between ranks here: the dispatcher does that."""

    def each(self) -> list[ExpertPair]:
        """Return each expert's pair. The split is part of the autograd graph: call this once per forward pass, not once per expert."""
        experts = len(next(half.experts for half in self.halves.values() if half.experts is not None))
        a, *b = (
            [weight] * experts if weight.ndim == 2 else weight.unbind() for weight in (torch.cat(self._of("a"), dim=-2), *self._of("b"))
        )
        return [ExpertPair(self, first, second) for first, *second in zip(a, *b, strict=True)]

    def add_to_all(self, x: torch.Tensor, output: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Like `DensePairs.add`, for the rows of all experts, sorted by expert.

        Args:
            ends: int32[experts]; end of each expert's rows.
        """

        def times(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return _times(rows, weight) if weight.ndim == 2 else multiply(rows, ends, weight)

        hidden = self.scale * times(x, torch.cat(self._of("a"), dim=-2))
        return output + self.output(hidden, self._of("b"), times)

    def deltas(self) -> Iterator[torch.Tensor]:
        yield from (self.output(self.scale * pair.a.t(), pair.b).t() for pair in self.each())


@dataclass(frozen=True, eq=False)
class ExpertPair:
    """The pair of one expert.

    Attributes:
        a: [sum of the projections' ranks, in], one projection after another.
        b: [out, rank] of each projection.
    """

    pairs: ExpertPairs
    a: torch.Tensor
    b: Sequence[torch.Tensor]

    def add(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """See `DensePairs.add`."""
        return output + self.pairs.output(self.pairs.scale * (x @ self.a.t()), self.b)
