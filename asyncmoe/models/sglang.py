"""SGLang's layout of an engine rank's parameters.

Source: sglang 0.5.23 (layers/linear.py, layers/moe/fused_moe_triton/layer.py, layers/vocab_parallel_embedding.py,
runtime_context.py, the model classes).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

from asyncmoe.models.parallel import EngineParallel
from asyncmoe.models.shape import Shape, layer_shapes
from asyncmoe.models.shards import dtype_of, padded, put_gated_mlp, put_whole, shard, span
from asyncmoe.reshard.layout import PADDING, Box, LayoutBuilder, RankLayout, columns, rows, whole

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it shards it (DEFAULT_VOCAB_PADDING_SIZE)."""


@dataclass(frozen=True)
class EngineClass:
    """Differences between SGLang's model classes.

    Attributes:
        shares_tied_head: whether a tied model's output layer and embedding are one parameter, not two.
        experts: name of the part of a layer that has experts.
        glued: tensors, by name within a layer, that the loader accepts only in one call with the preceding tensor on disk.
        arguments: server arguments for keys of config.json that the class requires but transformers' class neither reads nor writes.
        dp_attention: whether the class has data-parallel attention (`EngineParallel.attn_dp`); none has it for a tied model, whose output
            layer is sharded over all ranks, unlike the embedding.
    """

    shares_tied_head: bool
    experts: str = "mlp"
    glued: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    dp_attention: bool = False


def sglang_layout(m: Shape, engine: EngineClass, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
    """Return the layout of an engine rank's parameters, by the names in its model's `named_parameters`, which lists a shared parameter
    once. Layer numbers are global.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    builder = LayoutBuilder(rank, dtype)
    _put_vocabulary(builder, m, "model.embed_tokens.weight", "embed", *parallel.attn_place(rank))
    layer = cache(partial(_layer, m, engine, parallel, rank, dtype))
    for dense, run in m.runs(range(m.layers)):
        builder.repeat(layer(dense), [(f"layers.{i}.", f"model.layers.{i}.") for i in run])
    builder.stack("model.norm.weight", [("final_norm", whole((m.hidden,)))])
    if not (m.tied and engine.shares_tied_head):
        _put_vocabulary(builder, m, "lm_head.weight", "embed" if m.tied else "head", parallel.tp, rank)
    return builder.build()


def _put_vocabulary(builder: LayoutBuilder, m: Shape, storage: str, tensor: str, parts: int, index: int) -> None:
    """Add a row shard of the padded embedding or output layer; it may end in padding or be all padding."""
    first, count = shard(padded(m.vocab, VOCAB_MULTIPLE), parts, index)
    real = max(0, min(count, m.vocab - first))
    held = [(tensor, rows((m.vocab, m.hidden), first, real))] if real else []
    padding = [(PADDING, whole((count - real, m.hidden)))] if real < count else []
    builder.stack(storage, held + padding)


def _layer(m: Shape, engine: EngineClass, parallel: EngineParallel, rank: int, dtype: str, dense: bool) -> RankLayout:
    """Return the layout of one layer; tensors and parameters are named within the layer."""
    builder, shapes = LayoutBuilder(rank, dtype), layer_shapes(m, dense)
    m.attention.put_sglang(builder, m, parallel)
    put_whole(builder, shapes, "input_layernorm.weight", "attn_norm")
    put_whole(builder, shapes, "post_attention_layernorm.weight", "mlp_norm")
    if dense:
        put_gated_mlp(builder, shapes, "", "mlp.gate_up_proj.weight", "mlp.down_proj.weight", parallel.tp, rank)
        return builder.build()
    part = engine.experts
    put_whole(builder, shapes, f"{part}.gate.weight", "router", dtype_of(m, "router"))
    if m.router_bias:
        put_whole(builder, shapes, f"{part}.gate.e_score_correction_bias", "router_bias", dtype_of(m, "router_bias"))
    if m.shared_width:
        front = f"{part}.shared_experts"
        put_gated_mlp(builder, shapes, "shared.", f"{front}.gate_up_proj.weight", f"{front}.down_proj.weight", parallel.tp, rank)
    _stacked_experts(builder, m, parallel, f"{part}.experts")
    return builder.build()


def _stacked_experts(builder: LayoutBuilder, m: Shape, parallel: EngineParallel, name: str) -> None:
    """Add w13 [experts of the rank, gate rows then up rows, hidden] and w2 [experts of the rank, hidden, columns of down]."""
    held = span(m.experts, parallel.ep, parallel.ep_rank(builder.rank))
    begin, width = shard(m.expert_width, parallel.moe_tp, parallel.moe_tp_rank(builder.rank))
    up = rows((m.expert_width, m.hidden), begin, width)
    down = columns((m.hidden, m.expert_width), begin, width)
    w13: list[tuple[str, Box, tuple[int, ...]]] = []
    w2: list[tuple[str, Box, tuple[int, ...]]] = []
    for local, expert in enumerate(held):
        w13 += [(f"experts.{expert}.gate", up, (local, 0, 0)), (f"experts.{expert}.up", up, (local, width, 0))]
        w2.append((f"experts.{expert}.down", down, (local, 0, 0)))
    builder.place(f"{name}.w13_weight", (len(held), 2 * width, m.hidden), w13)
    builder.place(f"{name}.w2_weight", (len(held), m.hidden, width), w2)
