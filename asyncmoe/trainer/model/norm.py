"""RMSNorm for Megatron's local layer spec."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under sequence parallelism.

    Megatron's wrapper of torch's RMSNorm refuses sequence parallelism (`transformer/torch_norm.py`), which needs only the
    `sequence_parallel` flag: each tensor-parallel rank sees its own rows, and `finalize_model_grads` sums the gradients of flagged weights.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=None if config.use_cpu_initialization else "cuda")
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
