"""Patches for latent attention in an engine on a machine without CUDA; see `cpu`."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch


def _absorbed(module: ModuleType) -> None:
    """Compute all tokens on the compressed vectors. SGLang computes a prompt's first tokens with per-head keys and values, which this
    backend ignores: it attends to its cache of compressed vectors. If their size equals a head's, the result is silently wrong; otherwise
    there is an error."""
    vars(module)["AttentionBackendRegistry"].register("torch_native", lambda *_: vars(module)["AttnForwardMethod"].MLA)


def _plain_positions(module: ModuleType) -> None:
    """Compute unscaled positions with `get_rope`, as in other models, because `get_rope_cpu` asserts DeepSeek's scaling."""
    scaled, plain = vars(module)["get_rope_cpu"], vars(module)["get_rope"]

    def get_rope_cpu(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        dtype: Any = None,
        partial_rotary_factor: float = 1.0,
        device: str | None = None,
    ) -> Any:
        known = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
        return plain(*known) if rope_scaling is None else scaled(*known, device)

    vars(module)["get_rope_cpu"] = get_rope_cpu


def _corrections(module: ModuleType) -> None:
    """Replace the Triton kernels that add an adapter of kv_b_proj, a layer that is never called itself."""
    vars(module).update(apply_q_correction=_apply_q_correction, apply_v_correction=_apply_v_correction)


def _apply_q_correction(attention: Any, q_nope: torch.Tensor, q_nope_out: torch.Tensor) -> torch.Tensor:
    """q_nope_out [tokens, heads, kv_lora_rank] += scale * q_nope [tokens, heads, qk_nope_head_dim] B_k A."""
    for rows, a, b, scale in _adapters(attention):
        q_nope_out[rows] += scale * torch.einsum("thn,hnr->thr", q_nope[rows], b[:, : attention.qk_nope_head_dim]) @ a
    return q_nope_out


def _apply_v_correction(attention: Any, attended: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """output [tokens, heads * v_head_dim] += scale * attended [tokens, heads, kv_lora_rank] A^T B_v^T."""
    values = output.view(len(output), attention.num_local_heads, attention.v_head_dim)
    for rows, a, b, scale in _adapters(attention):
        values[rows] += scale * torch.einsum("thr,hvr->thv", attended[rows] @ a.t(), b[:, attention.qk_nope_head_dim :])
    return output


def _adapters(attention: Any) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, float]]:
    """Yield for each run of tokens with an adapter: its slice, A [rank, kv_lora_rank], B [heads, rows of a head, rank] and the scale."""
    layer = attention.kv_b_proj
    batch = layer.lora_backend.batch_info
    if not getattr(layer, "set_lora", False) or batch is None:
        return
    begin = 0
    for slot, count in zip(batch.weight_indices_cpu.tolist(), batch.seg_lens_cpu.tolist(), strict=True):
        rank = int(batch.lora_ranks_cpu[slot])
        if rank:
            b = layer.B_buffer[slot, :, :rank].unflatten(0, (attention.num_local_heads, -1))
            yield slice(begin, begin + count), layer.A_buffer[slot, :rank], b, float(batch.scalings_cpu[slot])
        begin += count


PATCHES = {
    "sglang.srt.models.deepseek_common.attention_backend_handler": _absorbed,
    "sglang.srt.layers.rotary_embedding.factory": _plain_positions,
    "sglang.srt.lora.deepseek_mla_correction": _corrections,
}
