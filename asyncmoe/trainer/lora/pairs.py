"""Modules that hold pairs and add them to a layer's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

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

Times = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, weight) -> output rows."""


class Pairs(torch.nn.Module):
    """The pairs of one linear layer; for an expert layer, the pairs of all the rank's experts.

    Args:
        halves: the halves of the pairs; each becomes a parameter of the same name.
        outputs: rows of each projection of the linear layer on this rank, by name, in Megatron's order.
        query_groups: query groups on this rank, each with its own rows of all projections, as in linear_qkv; 1 for all other layers.
        layer: number of the layer in the model.
    """

    def __init__(self, halves: Sequence[Half], outputs: Mapping[str, int], query_groups: int, layer: int, scale: float, seed: int) -> None:
        super().__init__()
        self.halves = {half.name: half for half in halves}
        self.outputs, self.query_groups, self.layer, self.scale = outputs, query_groups, layer, scale
        for half in halves:
            self.register_parameter(half.name, torch.nn.Parameter(initial(half, layer, seed)))
        self.projections = [name for name in outputs if f"{name}_a" in self.halves]

    def deltas(self) -> Iterator[torch.Tensor]:
        """Yield the pairs' contribution to the layer's weight, [rows, in] on this rank; for experts, one per expert."""
        raise NotImplementedError

    def output(self, hidden: torch.Tensor, b: Sequence[torch.Tensor], times: Times = F.linear) -> torch.Tensor:
        """Return the pairs' output on this rank, [..., rows], from hidden [..., sum of the projections' ranks], one projection after
        another."""
        made = dict(zip(self.projections, torch.split(hidden, [half.shape[-1] for half in b], dim=-1), strict=True))
        with_b = dict(zip(self.projections, b, strict=True))
        parts = [
            times(made[name], with_b[name]) if name in made else hidden.new_zeros((*hidden.shape[:-1], rows))
            for name, rows in self.outputs.items()
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([torch.unflatten(part, -1, (self.query_groups, -1)) for part in parts], dim=-1).flatten(-2)

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
            return F.linear(rows, weight) if weight.ndim == 2 else multiply(rows, ends, weight)

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
