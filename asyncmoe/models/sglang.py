"""SGLang's layout of an engine rank's parameters.

Source: sglang 0.5.23 (layers/linear.py, layers/moe/fused_moe_triton/layer.py, layers/vocab_parallel_embedding.py,
models/qwen3.py, models/qwen3_moe.py, models/qwen2_moe.py, runtime_context.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncmoe.models.parallel import EngineParallel
from asyncmoe.models.shape import Shape, Shapes, layer_shapes
from asyncmoe.models.shards import put_columns, put_gated_mlp, put_padded_rows, put_whole, shard
from asyncmoe.reshard.layout import Box, LayoutBuilder, RankLayout, columns, rows

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it shards it (DEFAULT_VOCAB_PADDING_SIZE)."""


@dataclass(frozen=True)
class EngineClass:
    """In what the model classes of SGLang differ.

    Attributes:
        shares_tied_head: with one pipeline stage, a tied model's output layer is the embedding, one parameter; else it has its own.
        head_on_every_stage: pipeline stages before the last hold and load an output layer too, unused.
    """

    shares_tied_head: bool
    head_on_every_stage: bool


def sglang_layout(m: Shape, engine: EngineClass, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
    """An engine rank's parameters, as `named_parameters` of its model names them: a shared parameter once. Layer numbers are global.

    Raises:
        ConfigError: sizes that do not divide the model.
    """
    top: Shapes = {"embed": (m.vocab, m.hidden), "head": (m.vocab, m.hidden), "final_norm": (m.hidden,)}
    first, last = parallel.pp_rank(rank) == 0, parallel.pp_rank(rank) == parallel.pp - 1
    builder = LayoutBuilder(rank, dtype)
    if first:
        vocab = parallel.attention_tp, parallel.attention_tp_rank(rank)
        put_padded_rows(builder, top, "model.embed_tokens.weight", "embed", VOCAB_MULTIPLE, *vocab)
    layer: dict[bool, RankLayout] = {}
    for dense, run in m.runs(parallel.layers(m.layers, rank)):
        if dense not in layer:
            layer[dense] = _layer(m, parallel, rank, dtype, dense)
        builder.repeat(layer[dense], [(f"layers.{i}.", f"model.layers.{i}.") for i in run])
    if last:
        put_whole(builder, top, "model.norm.weight", "final_norm")
    shared = m.tied and engine.shares_tied_head and parallel.pp == 1
    if (last or engine.head_on_every_stage) and not shared:
        place = parallel.head_tp, rank % parallel.head_tp
        put_padded_rows(builder, top, "lm_head.weight", "embed" if m.tied else "head", VOCAB_MULTIPLE, *place)
    return builder.build()


def _layer(m: Shape, parallel: EngineParallel, rank: int, dtype: str, dense: bool) -> RankLayout:
    """One layer; tensors and parameters are named within it."""
    builder, shapes = LayoutBuilder(rank, dtype), layer_shapes(m, dense)
    attention = parallel.attention_tp, parallel.attention_tp_rank(rank)
    builder.stack("self_attn.qkv_proj.weight", _qkv_stacked(m, *attention))
    put_columns(builder, shapes, "self_attn.o_proj.weight", "o", *attention)
    for part in ("q_norm", "k_norm"):
        put_whole(builder, shapes, f"self_attn.{part}.weight", part)
    put_whole(builder, shapes, "input_layernorm.weight", "attn_norm")
    put_whole(builder, shapes, "post_attention_layernorm.weight", "mlp_norm")
    if dense:
        # These classes do not look at --moe-dense-tp-size: a dense MLP is always divided over all tensor ranks.
        put_gated_mlp(builder, shapes, "", "mlp.gate_up_proj.weight", "mlp.down_proj.weight", parallel.tp, parallel.tp_rank(rank))
    else:
        put_whole(builder, shapes, "mlp.gate.weight", "router")
        _stacked_experts(builder, m, parallel, "mlp.experts")
    return builder.build()


def _qkv_stacked(m: Shape, tp: int, rank: int) -> list[tuple[str, Box]]:
    """This rank's query heads, then its key heads, then its value heads; with fewer key heads than ranks, neighbours share one."""
    d = m.head_dim
    q_first, q_count = shard(m.heads, tp, rank)
    kv_first, kv_count = shard(m.kv_heads, tp, rank) if m.kv_heads >= tp else (rank // (tp // m.kv_heads), 1)
    kv = rows((m.kv_heads * d, m.hidden), kv_first * d, kv_count * d)
    q = rows((m.heads * d, m.hidden), q_first * d, q_count * d)
    return [("q", q), ("k", kv), ("v", kv)]


def _stacked_experts(builder: LayoutBuilder, m: Shape, parallel: EngineParallel, name: str) -> None:
    """w13 [slots here, gate rows then up rows, hidden] and w2 [slots here, hidden, columns of down]."""
    first, count = shard(m.experts + parallel.redundant, parallel.ep, parallel.ep_rank(builder.rank))
    begin, width = shard(m.expert_width, parallel.moe_tp, parallel.moe_tp_rank(builder.rank))
    up = rows((m.expert_width, m.hidden), begin, width)
    down = columns((m.hidden, m.expert_width), begin, width)
    w13: list[tuple[str, Box, tuple[int, ...]]] = []
    w2: list[tuple[str, Box, tuple[int, ...]]] = []
    for local in range(count):
        expert = f"experts.{(first + local) % m.experts}"
        w13 += [(f"{expert}.gate", up, (local, 0, 0)), (f"{expert}.up", up, (local, width, 0))]
        w2.append((f"{expert}.down", down, (local, 0, 0)))
    builder.place(f"{name}.w13_weight", (count, 2 * width, m.hidden), w13)
    builder.place(f"{name}.w2_weight", (count, m.hidden, width), w2)
