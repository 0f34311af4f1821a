"""SGLang's layout of an engine rank's parameters.

Source: sglang 0.5.23 (layers/linear.py, layers/moe/fused_moe_triton/layer.py, layers/vocab_parallel_embedding.py,
runtime_context.py, the model classes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncmoe.models.parallel import EngineParallel
from asyncmoe.models.shape import Shape, Shapes, layer_shapes
from asyncmoe.models.shards import dtype_of, put_gated_mlp, put_padded_rows, put_whole, shard
from asyncmoe.reshard.layout import Box, LayoutBuilder, RankLayout, columns, rows

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it shards it (DEFAULT_VOCAB_PADDING_SIZE)."""


@dataclass(frozen=True)
class EngineClass:
    """Differences between SGLang's model classes.

    Attributes:
        shares_tied_head: with one pipeline stage, a tied model's output layer and embedding are one parameter; otherwise separate ones.
        head_on_every_stage: pipeline stages before the last also hold and load an output layer, unused.
        experts: name of the part of a layer that has experts.
        replicates_dense: the class supports --moe-dense-tp-size 1.
        redundant: the class supports --ep-num-redundant-experts.
        dp_attention: the class supports data-parallel attention; otherwise it shards attention over all tensor ranks even with dp, which
            SGLang's scheduler does not expect.
        tied_stages: a tied model can have several pipeline stages.
        glued: tensors, by name within a layer, that the loader accepts only in one call with the preceding tensor on disk.
        arguments: of the server, for keys of config.json that the class requires and transformers' class neither reads nor writes.
    """

    shares_tied_head: bool
    head_on_every_stage: bool
    experts: str = "mlp"
    replicates_dense: bool = False
    redundant: bool = True
    dp_attention: bool = True
    tied_stages: bool = True
    glued: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


def sglang_layout(m: Shape, engine: EngineClass, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
    """Return the layout of an engine rank's parameters, by the names in its model's `named_parameters`, a shared parameter once. Layer
    numbers are global.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    top: Shapes = {"embed": (m.vocab, m.hidden), "head": (m.vocab, m.hidden), "final_norm": (m.hidden,)}
    first, last = parallel.pp_rank(rank) == 0, parallel.pp_rank(rank) == parallel.pp - 1
    builder = LayoutBuilder(rank, dtype)
    if not engine.dp_attention:
        parallel = replace(parallel, dp=1, dp_lm_head=False)
    if first:
        vocab = parallel.attention_tp, parallel.attention_tp_rank(rank)
        put_padded_rows(builder, top, "model.embed_tokens.weight", "embed", VOCAB_MULTIPLE, *vocab)
    layer: dict[bool, RankLayout] = {}
    for dense, run in m.runs(parallel.layers(m.layers, rank)):
        if dense not in layer:
            layer[dense] = _layer(m, engine, parallel, rank, dtype, dense)
        builder.repeat(layer[dense], [(f"layers.{i}.", f"model.layers.{i}.") for i in run])
    if last:
        put_whole(builder, top, "model.norm.weight", "final_norm")
    shared = m.tied and engine.shares_tied_head and parallel.pp == 1
    if (last or engine.head_on_every_stage) and not shared:
        place = parallel.head_tp, rank % parallel.head_tp
        put_padded_rows(builder, top, "lm_head.weight", "embed" if m.tied else "head", VOCAB_MULTIPLE, *place)
    return builder.build()


def _layer(m: Shape, engine: EngineClass, parallel: EngineParallel, rank: int, dtype: str, dense: bool) -> RankLayout:
    """Return the layout of one layer; tensors and parameters are named within the layer."""
    builder, shapes = LayoutBuilder(rank, dtype), layer_shapes(m, dense)
    m.attention.put_sglang(builder, m, parallel)
    put_whole(builder, shapes, "input_layernorm.weight", "attn_norm")
    put_whole(builder, shapes, "post_attention_layernorm.weight", "mlp_norm")
    all_ranks, one_rank = (parallel.tp, parallel.tp_rank(rank)), (1, 0)
    if dense:
        place = one_rank if engine.replicates_dense and parallel.dense_tp1 else all_ranks
        put_gated_mlp(builder, shapes, "", "mlp.gate_up_proj.weight", "mlp.down_proj.weight", *place)
        return builder.build()
    part = engine.experts
    put_whole(builder, shapes, f"{part}.gate.weight", "router", dtype_of(m, "router"))
    if m.router_bias:
        put_whole(builder, shapes, f"{part}.gate.e_score_correction_bias", "router_bias", dtype_of(m, "router_bias"))
    if m.shared_width and not parallel.fused_shared:
        place = one_rank if parallel.a2a else all_ranks
        names = [f"{part}.shared_experts.{linear}.weight" for linear in ("gate_up_proj", "down_proj")]
        put_gated_mlp(builder, shapes, "shared.", names[0], names[1], *place)
    _stacked_experts(builder, m, parallel, f"{part}.experts")
    return builder.build()


def _stacked_experts(builder: LayoutBuilder, m: Shape, parallel: EngineParallel, name: str) -> None:
    """Add w13 [slots of the rank, gate rows then up rows, hidden] and w2 [slots of the rank, hidden, columns of down]; fused shared experts
    have the last slot of every rank."""
    first, count = shard(m.experts + parallel.redundant, parallel.ep, parallel.ep_rank(builder.rank))
    begin, width = shard(m.expert_width, parallel.moe_tp, parallel.moe_tp_rank(builder.rank))
    up = rows((m.expert_width, m.hidden), begin, width)
    down = columns((m.hidden, m.expert_width), begin, width)
    held = [f"experts.{(first + local) % m.experts}" for local in range(count)]
    if m.shared_width and parallel.fused_shared:
        held.append("shared")
    w13: list[tuple[str, Box, tuple[int, ...]]] = []
    w2: list[tuple[str, Box, tuple[int, ...]]] = []
    for local, expert in enumerate(held):
        w13 += [(f"{expert}.gate", up, (local, 0, 0)), (f"{expert}.up", up, (local, width, 0))]
        w2.append((f"{expert}.down", down, (local, 0, 0)))
    builder.place(f"{name}.w13_weight", (len(held), 2 * width, m.hidden), w13)
    builder.place(f"{name}.w2_weight", (len(held), m.hidden, width), w2)
