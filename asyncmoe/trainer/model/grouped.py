"""Experts through torch's grouped matrix multiplication: one call for all experts of a rank, where Transformer Engine is not there.

On GPUs of capability 9 and 10 torch has a kernel for bfloat16, which needs nothing of the host. Elsewhere, and of float32, it multiplies
matrix by matrix itself, and reads the ends of the experts' rows on the host; see `asyncmoe.trainer.model.switches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP

from asyncmoe.errors import InvariantBroken

Added = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows given [T, in], rows made [T, out], int32[E] ends of the experts' rows) -> [T, out]."""


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Takes the place of Megatron's `SequentialMLP`, whose parameters, names and checkpoints it has: gated with SiLU, without biases.

    The weights of all experts are put side by side for each multiplication, and again in the backward pass: a copy of a layer's
    experts at a time, never of two layers'.

    Attributes:
        added: what adapters add to a layer's output, by "linear_fc1" and "linear_fc2".
    """

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_local_experts, config, *args, **kwargs)
        gated = config.gated_linear_unit and config.activation_func is F.silu
        if not gated or config.add_bias_linear or config.moe_apply_probs_on_input:
            raise InvariantBroken("GroupedExperts is a gated MLP with SiLU, without biases, weighted after it")
        self.added: dict[str, Added] = {}

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """rows [T, hidden], those of the first expert, then of the second ...; tokens_per_expert int [E], on any device; probs [T] ->
        [T, hidden] on this rank: expert-tensor-parallel ranks have parts of a sum."""
        # The dispatcher has moved the counts to the host, or has them on the device: neither way waits for the other.
        ends = tokens_per_expert.cumsum(0).to(torch.int32).to(rows.device, non_blocking=True)
        made = self._linear("linear_fc1", rows, ends)
        if self.config.bias_activation_fusion:
            made = weighted_bias_swiglu_impl(made, None, probs.unsqueeze(-1))
        else:
            gate, up = made.chunk(2, dim=-1)
            made = (F.silu(gate) * up * probs.unsqueeze(-1)).to(made.dtype)
        return self._linear("linear_fc2", made, ends), None

    def _linear(self, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        made = multiply(rows, ends, *(getattr(expert, name).weight for expert in self.local_experts))
        return self.added[name](rows, made, ends) if name in self.added else made


def multiply(rows: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Rows [T, in] times the weight of their group, transposed: [T, out].

    Args:
        ends: int32[E]; where each group's rows end, ascending, the last T.
        weights: [out, in] of each group, or one tensor [E, out, in].
    """
    made: torch.Tensor = _Multiplied.apply(rows, ends, *weights)  # type: ignore[no-untyped-call]
    return made


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        if not len(rows):
            return rows.new_zeros(0, weights[0].shape[-2])
        return F.grouped_mm(_plain(rows), _joint(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gradient = _plain(gradient)
        of_rows: torch.Tensor | None = None
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        if not len(rows):
            return torch.zeros_like(rows), None, *(torch.zeros_like(weight) for weight in weights)
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(gradient, _joint(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            joint = F.grouped_mm(gradient.t(), _plain(rows), offs=ends)
            of_weights = [joint] if weights[0].ndim == 3 else list(joint.unbind())
        return of_rows, None, *of_weights


def _plain(rows: torch.Tensor) -> torch.Tensor:
    """Row after row: an expanded gradient is not so, and one row may be said to be as far from the next as it likes."""
    return rows.contiguous().view(-1).view(rows.shape)


def _joint(weights: Any) -> torch.Tensor:
    return weights[0] if weights[0].ndim == 3 else torch.stack(tuple(weights))
