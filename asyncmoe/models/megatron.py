"""Megatron's layout of a rank's parameters, and the configuration that makes Megatron build them.

Source: megatron/core 0.16 (models/gpt, transformer, the local and the Transformer Engine layer specs).
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from asyncmoe.models.parallel import MegatronParallel
from asyncmoe.models.shape import HfConfig, Shape, layer_shapes
from asyncmoe.models.shards import dtype_of, put_gated_mlp, put_whole, shard, span
from asyncmoe.reshard.layout import LayoutBuilder, RankLayout, rows, whole


def chunk_prefix(chunk: int, chunks: int) -> str:
    """Return the prefix of a model chunk's parameter names; empty if the rank has one chunk.

    Megatron keeps a rank's chunks as a list of models with equal parameter names.
    """
    return f"chunks.{chunk}." if chunks > 1 else ""


def megatron_layout(m: Shape, parallel: MegatronParallel, rank: int, dtype: str) -> RankLayout:
    """Return the layout of a rank's parameters. Layers are numbered from 0 in every model chunk; in a tied model with several
    pipeline stages, the last chunk's output layer is a copy of the embedding.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    builder = LayoutBuilder(rank, dtype)
    stage = parallel.pp_rank(rank)
    vocab_rows = rows((m.vocab, m.hidden), *shard(m.vocab, parallel.tp, parallel.tp_rank(rank)))
    layer = cache(partial(_layer, m, parallel, rank, dtype))
    for chunk, layers in enumerate(parallel.chunk_layers(m.layers, rank)):
        front = chunk_prefix(chunk, parallel.vpp)
        if stage == 0 and chunk == 0:
            builder.stack(f"{front}embedding.word_embeddings.weight", [("embed", vocab_rows)])
        for dense, run in m.runs(layers):
            builder.repeat(layer(dense), [(f"layers.{i}.", f"{front}decoder.layers.{i - layers.start}.") for i in run])
        if stage == parallel.pp - 1 and chunk == parallel.vpp - 1:
            builder.stack(f"{front}decoder.final_layernorm.weight", [("final_norm", whole((m.hidden,)))])
            if not m.tied or parallel.pp > 1:
                builder.stack(f"{front}output_layer.weight", [("embed" if m.tied else "head", vocab_rows)])
    return builder.build()


def _layer(m: Shape, parallel: MegatronParallel, rank: int, dtype: str, dense: bool) -> RankLayout:
    """Return the layout of one layer; tensors and parameters are named within the layer."""
    builder, shapes = LayoutBuilder(rank, dtype), layer_shapes(m, dense)
    tp, tp_rank = parallel.tp, parallel.tp_rank(rank)
    m.attention.put_megatron(builder, m, parallel)
    # The norm before a mixture of experts has no linear layer to fuse with, because the router and the dispatcher follow it.
    fused = "mlp.linear_fc1.layer_norm_weight"
    put_whole(builder, shapes, fused if parallel.te and dense else "pre_mlp_layernorm.weight", "mlp_norm")
    if dense:
        put_gated_mlp(builder, shapes, "", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", tp, tp_rank)
        return builder.build()
    put_whole(builder, shapes, "mlp.router.weight", "router", dtype_of(m, "router"))
    if m.router_bias:
        put_whole(builder, shapes, "mlp.router.expert_bias", "router_bias", dtype_of(m, "router_bias"))
    if m.shared_width:
        fc1, fc2 = ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight")
        put_gated_mlp(builder, shapes, "shared.", fc1, fc2, tp, tp_rank)
    for local, e in enumerate(span(m.experts, parallel.ep, parallel.ep_rank(rank))):
        fc1, fc2 = (
            f"mlp.experts.linear_{fc}.weight{local}" if parallel.te else f"mlp.experts.local_experts.{local}.linear_{fc}.weight"
            for fc in ("fc1", "fc2")
        )
        put_gated_mlp(builder, shapes, f"experts.{e}.", fc1, fc2, parallel.etp, parallel.etp_rank(rank))
    return builder.build()


def transformer_arguments(hf: HfConfig, m: Shape) -> dict[str, Any]:
    """Return the keyword arguments of TransformerConfig, except the router's, which the family defines."""
    from torch.nn.functional import silu

    experts = {
        "moe_layer_freq": [int(i not in m.dense_layers) for i in range(m.layers)],
        "num_moe_experts": m.experts,
        "moe_ffn_hidden_size": m.expert_width,
        "moe_router_topk": m.experts_per_token,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_enable_expert_bias": m.router_bias,
        "moe_router_bias_update_rate": 0.0,  # the trainer implements this rule itself
        "moe_shared_expert_intermediate_size": m.shared_width or None,
    }
    return {
        "num_layers": m.layers,
        "hidden_size": m.hidden,
        "num_attention_heads": m.heads,
        "add_bias_linear": False,
        "ffn_hidden_size": m.dense_width,
        "gated_linear_unit": True,
        "activation_func": silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "moe_token_dispatcher_type": "alltoall",  # Megatron's default refuses rows of different lengths, even without experts
        **(experts if m.experts else {}),
        **m.attention.transformer_arguments(hf, m),
    }


def gpt_arguments(hf: HfConfig, m: Shape) -> dict[str, Any]:
    """Return the keyword arguments of GPTModel."""
    return {
        "share_embeddings_and_output_weights": m.tied,
        "vocab_size": m.vocab,
        "max_sequence_length": hf.get("max_position_embeddings", 32768),
        **m.attention.gpt_arguments(hf),
    }
