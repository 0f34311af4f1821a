"""Experts through torch's grouped matrix multiplication: one call for all experts of a rank, without Transformer Engine.

On GPUs of capability 9 and 10 torch has a bfloat16 kernel that does not involve the host. Elsewhere, and for float32, torch multiplies
matrix by matrix and reads the ends of the experts' rows on the host; see `asyncmoe.trainer.model.switches`.
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
"""(input rows [T, in], output rows [T, out], int32[E] ends of the experts' rows) -> [T, out]."""


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Replaces Megatron's `SequentialMLP` for MLPs gated with SiLU, without biases. Parameters, names and checkpoints stay the same.

    Each multiplication, also in the backward pass, stacks the weights of all experts: a temporary copy of one layer's experts at a
    time.

    Attributes:
        added: functions that add adapters to a layer's output, by "linear_fc1" and "linear_fc2".
    """

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_local_experts, config, *args, **kwargs)
        gated = config.gated_linear_unit and config.activation_func is F.silu
        if not gated or config.add_bias_linear or config.moe_apply_probs_on_input:
            supported = "gated SiLU MLPs without biases, with probabilities applied after the activation"
            raise InvariantBroken(f"GroupedExperts supports only {supported}")
        self.added: dict[str, Added] = {}

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """rows [T, hidden], sorted by expert; tokens_per_expert int [E], on any device; probs [T] -> [T, hidden] on this rank, where
        expert-tensor-parallel ranks hold terms of a sum."""
        # The dispatcher keeps the counts on the host or on the device; in both cases the host need not wait for the device.
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
    """Multiply rows [T, in] by the transposed weight of their group: [T, out].

    Args:
        ends: int32[E]; end of each group's rows, ascending, the last is T.
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
        return F.grouped_mm(plain(rows), _joint(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gradient = plain(gradient)
        of_rows: torch.Tensor | None = None
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        if not len(rows):
            return torch.zeros_like(rows), None, *(torch.zeros_like(weight) for weight in weights)
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(gradient, _joint(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            joint = F.grouped_mm(gradient.t(), plain(rows), offs=ends)
            of_weights = [joint] if weights[0].ndim == 3 else list(joint.unbind())
        return of_rows, None, *of_weights


def plain(rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the standard strides: an expanded gradient has others, and the stride of a dimension of 1 is arbitrary."""
    return rows.contiguous().view(-1).view(rows.shape)


def _joint(weights: Any) -> torch.Tensor:
    return weights[0] if weights[0].ndim == 3 else torch.stack(tuple(weights))
