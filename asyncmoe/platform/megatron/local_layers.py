"""Norm and latent attention for Megatron's local layer spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under sequence parallelism.

    Megatron's wrapper of torch's RMSNorm refuses sequence parallelism (`transformer/torch_norm.py`), which needs only the
    `sequence_parallel` flag: each tensor-parallel rank sees its own rows, and `finalize_model_grads` sums the gradients of flagged weights.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=None if config.use_cpu_initialization else "cuda")
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer without bias, whole on every tensor-parallel rank, like Transformer Engine's with parallel_mode "duplicated".

    Each rank sees its own rows of the sequence; `finalize_model_grads` sums the gradients of weights with the `sequence_parallel` flag.
    """

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]  # as Megatron's: (output, bias)
        return super().forward(rows), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's latent attention, with the down-projections whole on every rank.

    Megatron's local spec divides these layers by output and gathers the outputs without a reduction in the backward pass. For the part of
    the key that all heads share, a rank then has only the gradient of its own heads (megatron-core 0.16 and 0.19).
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Drop the norm that megatron-core 0.19 expects before queries computed directly from the hidden state; the model has none."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
