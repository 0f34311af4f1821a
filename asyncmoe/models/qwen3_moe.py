"""Qwen3-MoE: grouped-query attention with query and key norms, top-k softmax routing, no shared expert.

Sources: transformers/models/qwen3_moe (checkpoint names and mathematics), megatron/core 0.16 (local and Transformer Engine
layer specs), sglang 0.5.23 (models/qwen3_moe.py, layers/linear.py, layers/moe/fused_moe_triton/layer.py,
layers/vocab_parallel_embedding.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.models.family import EngineParallel, Family, HfConfig, MegatronParallel, Shapes
from asyncmoe.models.shards import check_divides, padded, put_columns, put_gated_mlp, put_padded_rows, put_whole, shard, span
from asyncmoe.reshard.layout import Box, LayoutBuilder, RankLayout, columns, rows, whole

NAME = "qwen3_moe"
SGLANG_VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it shards it (DEFAULT_VOCAB_PADDING_SIZE)."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, under the names the formulas use."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dense_width: int
    experts: int
    expert_width: int
    experts_per_token: int
    tied: bool
    dense_layers: frozenset[int]

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.kv_heads


def shape_of(hf: HfConfig) -> Shape:
    """Sizes from a configuration; keys as written by transformers 4 and 5.

    Raises:
        ConfigError: a key is missing.
    """
    layers = _get(hf, "num_hidden_layers")
    step = _get({"decoder_sparse_step": 1, **hf}, "decoder_sparse_step")
    only_dense = set(hf.get("mlp_only_layers") or ())
    return Shape(
        layers=layers,
        hidden=_get(hf, "hidden_size"),
        heads=_get(hf, "num_attention_heads"),
        kv_heads=_get(hf, "num_key_value_heads"),
        head_dim=hf.get("head_dim") or _get(hf, "hidden_size") // _get(hf, "num_attention_heads"),
        vocab=_get(hf, "vocab_size"),
        dense_width=_get(hf, "intermediate_size"),
        experts=_get(hf, "num_experts", "num_local_experts"),
        expert_width=_get(hf, "moe_intermediate_size"),
        experts_per_token=_get(hf, "num_experts_per_tok"),
        tied=bool(hf.get("tie_word_embeddings")),
        # Qwen3MoeDecoderLayer.__init__ of transformers
        dense_layers=frozenset(i for i in range(layers) if i in only_dense or (i + 1) % step),
    )


def _get(hf: HfConfig, *names: str) -> int:
    for name in names:
        value = hf.get(name)
        if isinstance(value, int) and value > 0:
            return value
        if value is not None:
            raise ConfigError(f"{name} in config.json", got=repr(value), expected="a positive integer")
    raise ConfigError(f"{names[0]} in config.json", got="nothing", expected="a positive integer")


# ---------------------------------------------------------------- canonical tensors


def tensors(hf: HfConfig) -> Shapes:
    """Canonical tensors and their shapes."""
    m = shape_of(hf)
    layer = {dense: _layer_shapes(m, dense) for dense in (False, True)}
    found: Shapes = {"embed": (m.vocab, m.hidden)}
    for i in range(m.layers):
        front = f"layers.{i}."
        found |= {front + name: shape for name, shape in layer[i in m.dense_layers].items()}
    found["final_norm"] = (m.hidden,)
    if not m.tied:
        found["head"] = (m.vocab, m.hidden)
    return found


def _layer_shapes(m: Shape, dense: bool) -> Shapes:
    """The tensors of one layer, named within it."""
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    found: Shapes = {"attn_norm": (m.hidden,), "q": (q, m.hidden), "k": (kv, m.hidden), "v": (kv, m.hidden), "o": (m.hidden, q)}
    found |= {"q_norm": (m.head_dim,), "k_norm": (m.head_dim,), "mlp_norm": (m.hidden,)}
    if dense:
        return found | _mlp_shapes("", m.dense_width, m.hidden)
    found["router"] = (m.experts, m.hidden)
    for e in range(m.experts):
        found |= _mlp_shapes(f"experts.{e}.", m.expert_width, m.hidden)
    return found


def _mlp_shapes(prefix: str, width: int, hidden: int) -> Shapes:
    return {f"{prefix}gate": (width, hidden), f"{prefix}up": (width, hidden), f"{prefix}down": (hidden, width)}


# ---------------------------------------------------------------- Hugging Face


def hf_layout(hf: HfConfig, dtype: str) -> RankLayout:
    """The checkpoint: every tensor whole, under the name it has in the safetensors files."""
    builder = LayoutBuilder(0, dtype)
    for tensor, shape in tensors(hf).items():
        builder.stack(hf_name(tensor), [(tensor, whole(shape))])
    return builder.build()


_HF_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_HF_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "router": "mlp.gate",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hf_name(tensor: str) -> str:
    """On-disk name of a canonical tensor."""
    if tensor in _HF_TOP:
        return _HF_TOP[tensor]
    _, layer, *rest = tensor.split(".")
    inner = f"mlp.experts.{rest[1]}.{rest[2]}_proj" if rest[0] == "experts" else _HF_IN_LAYER[rest[0]]
    return f"model.layers.{layer}.{inner}.weight"


# ---------------------------------------------------------------- Megatron


def megatron_layout(hf: HfConfig, parallel: MegatronParallel, rank: int, dtype: str) -> RankLayout:
    """A rank's parameters. Layers are numbered from 0 in every pipeline stage; a tied model whose first and last stage are
    apart has a copy of the embedding as the last stage's output layer."""
    m = shape_of(hf)
    builder = LayoutBuilder(rank, dtype)
    stage, tp = parallel.pp_rank(rank), parallel.tp_rank(rank)
    vocab_rows = rows((m.vocab, m.hidden), *shard(m.vocab, parallel.tp, tp))
    if stage == 0:
        builder.stack("embedding.word_embeddings.weight", [("embed", vocab_rows)])
    layer = {dense: _megatron_layer(m, parallel, rank, dtype, dense) for dense in (False, True)}
    first, count = shard(m.layers, parallel.pp, stage)
    for dense, run in _runs(m, first, count):
        builder.repeat(layer[dense], [(f"layers.{i}.", f"decoder.layers.{i - first}.") for i in run])
    if stage == parallel.pp - 1:
        builder.stack("decoder.final_layernorm.weight", [("final_norm", whole((m.hidden,)))])
        if not m.tied or parallel.pp > 1:
            builder.stack("output_layer.weight", [("embed" if m.tied else "head", vocab_rows)])
    return builder.build()


def _runs(m: Shape, first: int, count: int) -> Iterator[tuple[bool, list[int]]]:
    """Layers in order, as long as they are of one kind: (whether they are dense, their numbers)."""
    for dense, run in groupby(range(first, first + count), m.dense_layers.__contains__):
        yield dense, list(run)


def _megatron_layer(m: Shape, parallel: MegatronParallel, rank: int, dtype: str, dense: bool) -> RankLayout:
    """One layer; tensors and parameters are named within it."""
    builder, shapes = LayoutBuilder(rank, dtype), _layer_shapes(m, dense)
    tp, tp_rank = parallel.tp, parallel.tp_rank(rank)
    attention = "self_attention"
    put_whole(builder, shapes, f"{attention}.linear_qkv.layer_norm_weight" if parallel.te else "input_layernorm.weight", "attn_norm")
    builder.stack(f"{attention}.linear_qkv.weight", list(_qkv_by_group(m, *shard(m.kv_heads, tp, tp_rank))))
    put_whole(builder, shapes, f"{attention}.q_layernorm.weight", "q_norm")
    put_whole(builder, shapes, f"{attention}.k_layernorm.weight", "k_norm")
    put_columns(builder, shapes, f"{attention}.linear_proj.weight", "o", tp, tp_rank)
    # The norm before a mixture of experts has no linear layer to fuse with: the router and the dispatcher come first.
    fused = "mlp.linear_fc1.layer_norm_weight"
    put_whole(builder, shapes, fused if parallel.te and dense else "pre_mlp_layernorm.weight", "mlp_norm")
    if dense:
        put_gated_mlp(builder, shapes, "", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", tp, tp_rank)
        return builder.build()
    put_whole(builder, shapes, "mlp.router.weight", "router")
    for local, e in enumerate(span(m.experts, parallel.ep, parallel.ep_rank(rank))):
        fc1, fc2 = (
            f"mlp.experts.linear_{fc}.weight{local}" if parallel.te else f"mlp.experts.local_experts.{local}.linear_{fc}.weight"
            for fc in ("fc1", "fc2")
        )
        put_gated_mlp(builder, shapes, f"experts.{e}.", fc1, fc2, parallel.etp, parallel.etp_rank(rank))
    return builder.build()


def _qkv_by_group(m: Shape, first: int, count: int) -> Iterator[tuple[str, Box]]:
    """Rows of linear_qkv: for each query group its query heads, its key head, its value head."""
    d, r = m.head_dim, m.heads_per_group
    for group in range(first, first + count):
        yield "q", rows((m.heads * d, m.hidden), group * r * d, r * d)
        yield "k", rows((m.kv_heads * d, m.hidden), group * d, d)
        yield "v", rows((m.kv_heads * d, m.hidden), group * d, d)


# ---------------------------------------------------------------- SGLang


def sglang_layout(hf: HfConfig, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
    """An engine rank's parameters; pipeline and data parallel attention are not used."""
    m = shape_of(hf)
    top: Shapes = {"embed": (m.vocab, m.hidden), "head": (m.vocab, m.hidden), "final_norm": (m.hidden,)}
    builder = LayoutBuilder(rank, dtype)
    put_padded_rows(builder, top, "model.embed_tokens.weight", "embed", SGLANG_VOCAB_MULTIPLE, parallel.tp, rank)
    layer = {dense: _sglang_layer(m, parallel, rank, dtype, dense) for dense in (False, True)}
    for dense, run in _runs(m, 0, m.layers):
        builder.repeat(layer[dense], [(f"layers.{i}.", f"model.layers.{i}.") for i in run])
    put_whole(builder, top, "model.norm.weight", "final_norm")
    # A tied model has an output layer of its own here: SGLang's class for this family does not share the two.
    put_padded_rows(builder, top, "lm_head.weight", "embed" if m.tied else "head", SGLANG_VOCAB_MULTIPLE, parallel.tp, rank)
    return builder.build()


def _sglang_layer(m: Shape, parallel: EngineParallel, rank: int, dtype: str, dense: bool) -> RankLayout:
    """One layer; tensors and parameters are named within it."""
    builder, shapes, tp = LayoutBuilder(rank, dtype), _layer_shapes(m, dense), parallel.tp
    builder.stack("self_attn.qkv_proj.weight", _qkv_stacked(m, tp, rank))
    put_columns(builder, shapes, "self_attn.o_proj.weight", "o", tp, rank)
    for part in ("q_norm", "k_norm"):
        put_whole(builder, shapes, f"self_attn.{part}.weight", part)
    put_whole(builder, shapes, "input_layernorm.weight", "attn_norm")
    put_whole(builder, shapes, "post_attention_layernorm.weight", "mlp_norm")
    if dense:
        put_gated_mlp(builder, shapes, "", "mlp.gate_up_proj.weight", "mlp.down_proj.weight", tp, rank)
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
    """w13 [experts here, gate rows then up rows, hidden] and w2 [experts here, hidden, columns of down]."""
    first, count = shard(m.experts, parallel.ep, parallel.ep_rank(builder.rank))
    begin, width = shard(m.expert_width, parallel.moe_tp, parallel.moe_tp_rank(builder.rank))
    up = rows((m.expert_width, m.hidden), begin, width)
    down = columns((m.hidden, m.expert_width), begin, width)
    w13: list[tuple[str, Box, tuple[int, ...]]] = []
    w2: list[tuple[str, Box, tuple[int, ...]]] = []
    for local in range(count):
        expert = f"experts.{first + local}"
        w13 += [(f"{expert}.gate", up, (local, 0, 0)), (f"{expert}.up", up, (local, width, 0))]
        w2.append((f"{expert}.down", down, (local, 0, 0)))
    builder.place(f"{name}.w13_weight", (count, 2 * width, m.hidden), w13)
    builder.place(f"{name}.w2_weight", (count, m.hidden, width), w2)


# ---------------------------------------------------------------- Megatron's configuration


def megatron_config(hf: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of TransformerConfig and of GPTModel."""
    from torch.nn.functional import silu

    m = shape_of(hf)
    transformer = {
        "num_layers": m.layers,
        "hidden_size": m.hidden,
        "num_attention_heads": m.heads,
        "num_query_groups": m.kv_heads,
        "kv_channels": m.head_dim,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "add_bias_linear": False,
        "ffn_hidden_size": m.dense_width,
        "gated_linear_unit": True,
        "activation_func": silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "moe_layer_freq": [int(i not in m.dense_layers) for i in range(m.layers)],
        "num_moe_experts": m.experts,
        "moe_ffn_hidden_size": m.expert_width,
        "moe_router_topk": m.experts_per_token,
        "moe_router_score_function": "softmax",
        # Softmax over all experts, then top-k, then renormalised, equals softmax over the chosen: Megatron's post-softmax.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }
    gpt = {
        "position_embedding_type": "rope",
        "rotary_base": _rope(hf)["rope_theta"],
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": m.tied,
        "vocab_size": m.vocab,
        "max_sequence_length": hf.get("max_position_embeddings", 32768),
    }
    return transformer, gpt


def _rope(hf: HfConfig) -> dict[str, Any]:
    """Rotary parameters under transformers 5's names. Version 4 wrote rope_theta and rope_scaling, whose kind was once called type."""
    scaling = hf.get("rope_scaling") or {}
    old = {"rope_theta": hf.get("rope_theta", 10000.0), "rope_type": scaling.get("type", "default"), **scaling}
    return {**old, **(hf.get("rope_parameters") or {})}


# ---------------------------------------------------------------- what cannot work


def check(hf: HfConfig, trainer: MegatronParallel, engine: EngineParallel) -> None:
    """Refuse a model with a feature that is not carried over, and parallel sizes that do not divide it.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    m = shape_of(hf)
    _check_features(hf, m)
    check_divides("trainer.pp", trainer.pp, "num_hidden_layers", m.layers)
    check_divides("trainer.tp", trainer.tp, "num_attention_heads", m.heads)
    check_divides("trainer.tp", trainer.tp, "num_key_value_heads", m.kv_heads)
    check_divides("trainer.tp", trainer.tp, "vocab_size", m.vocab)
    check_divides("trainer.ep", trainer.ep, "num_experts", m.experts)
    check_divides("trainer.etp", trainer.etp, "moe_intermediate_size", m.expert_width)
    check_divides("engines.tp", engine.tp, "num_attention_heads", m.heads)
    if engine.tp % m.kv_heads and m.kv_heads % engine.tp:
        expected = f"a divisor or a multiple of the model's num_key_value_heads = {m.kv_heads}"
        raise ConfigError("engines.tp", got=engine.tp, expected=expected)
    check_divides("engines.tp", engine.tp, "padded vocab_size", padded(m.vocab, SGLANG_VOCAB_MULTIPLE))
    check_divides("engines.ep", engine.ep, "num_experts", m.experts)
    check_divides("engines.tp / engines.ep", engine.moe_tp, "moe_intermediate_size", m.expert_width)
    if m.dense_layers:
        check_divides("trainer.tp", trainer.tp, "intermediate_size", m.dense_width)
        check_divides("engines.tp", engine.tp, "intermediate_size", m.dense_width)


def _check_features(hf: HfConfig, m: Shape) -> None:
    """Every one of these would train another model than the engine serves."""
    wanted: list[tuple[str, object, object]] = [
        ("hidden_act", hf.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(hf.get("attention_bias", False)), False),
        ("attention_dropout", hf.get("attention_dropout") or 0, 0),
        ("use_sliding_window", bool(hf.get("use_sliding_window", False)), False),
        ("rope_parameters.rope_type", _rope(hf).get("rope_type"), "default"),
        # SGLang's class for this family neither shares nor loads a tied output layer.
        ("tie_word_embeddings", m.tied, False),
        ("quantization_config", hf.get("quantization_config"), None),
    ]
    for key, got, expected in wanted:
        if got != expected:
            raise ConfigError(
                f"{key} in config.json", got=repr(got), expected=f"{expected!r} ({NAME} is carried over without this feature)"
            )
    if m.heads % m.kv_heads:
        raise ConfigError("num_attention_heads in config.json", got=m.heads, expected=f"a multiple of num_key_value_heads = {m.kv_heads}")
    if m.experts_per_token > m.experts:
        raise ConfigError("num_experts_per_tok in config.json", got=m.experts_per_token, expected=f"at most num_experts = {m.experts}")


FAMILY = Family(
    name=NAME,
    check=check,
    tensors=tensors,
    hf_layout=hf_layout,
    megatron_layout=megatron_layout,
    sglang_layout=sglang_layout,
    megatron_config=megatron_config,
)
