"""What saves memory of a trainer's GPU, at the price of time."""

from __future__ import annotations

from typing import Literal

from asyncmoe.config.fields import Fraction, Section

Moment = Literal["float32", "bfloat16"]
"""Dtype in which Adam keeps an average of gradients."""


class MemorySection(Section):
    """What saves memory of a trainer's GPU besides recomputation, at the price of time; see docs/guides/memory.md. All of it needs a GPU,
    and the optimizer's state is sharded with it (optimizer.distributed)."""

    optimizer_offload: Fraction = 0.0
    """Share of the optimizer's state (float32 weights and Adam's averages, 12 bytes a parameter) that is kept in host memory and updated by
    the CPU (Megatron's HybridDeviceOptimizer). A parameter takes 16 bytes there, its gradient included."""
    exp_avg_dtype: Moment = "float32"
    """Dtype of Adam's averages of gradients; bfloat16 saves 2 bytes a parameter. Needs Transformer Engine, and no optimizer_offload.
    Checkpoints hold float32 in any case, and can be resumed with another dtype."""
    exp_avg_sq_dtype: Moment = "float32"
    """The same for the averages of squared gradients."""

    @property
    def low_precision(self) -> bool:
        """True if an average is not float32."""
        return "bfloat16" in (self.exp_avg_dtype, self.exp_avg_sq_dtype)

    @property
    def precision_aware(self) -> bool:
        """True for Megatron's precision-aware optimizer, which keeps its float32 weights itself: where they are offloaded none stay on the
        GPU."""
        return self.low_precision or self.optimizer_offload > 0
