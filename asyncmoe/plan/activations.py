"""Activation memory of a trainer rank's micro-batches, as a formula with one term per operation.

The formula counts what each operation of a layer keeps for the backward pass, as in Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv 2205.05198). With tensor and sequence parallelism of t, their layer keeps 34 s b h / t
bytes besides the scores (eq. 4; attention kernels that keep no scores need no more), or 2 s b h / t if whole layers are recomputed, and
the first of p stages has p micro-batches in flight (section 4.2.3). Their layer has ungrouped heads, an MLP of 4 h, and dropout. Here:

- s b is the number of rows of one packed micro-batch; attention has grouped queries, query and key norms if the model has them, and
  rotary angles of the rotated dimensions; there is no dropout;
- latent attention keeps each compressed vector three times, as a norm does, the key part shared by all heads once, and per head the
  query, the key, the value and twice the output; the down-projections share their input with the output of the preceding norm;
- a gated MLP of width f keeps 5 f per row: gate and up, silu of the gate, up as a factor, and the product;
- a mixture of experts keeps, for each row and each of its k experts, the expert's input h and 6 f, because the product is kept before
  and after the multiplication by the router's weight; rows are spread unevenly over ranks; shared experts are an MLP with the same
  input h;
- adapters keep their low-rank rows;
- the output layer keeps its input and 12 bytes per row whose token counts in the loss; its logits exist in blocks
  (`asyncmoe.models.head_blocks`). As an upper bound all rows are assumed to count, though rows of prompts and tool results do not;
- context-parallel ranks keep only their own rows, and hold the keys and values of all ranks while a layer attends.

The terms describe Megatron's unfused layers, and a test compares them with the tensors that torch saves. Fused kernels keep less.

A backward pass also needs gradients. On a GPU the formula assumes the maximum for them, the bytes of a layer's activations, because the
needs of kernels and the allocator have not been measured there. On CPUs the formula follows the operations, each of which frees its kept
tensors (`_backward_on_cpu`); `asyncmoe bench memory` compares the result with the bytes of tensors in real steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from asyncmoe.config.lora import ATTENTION, MLP
from asyncmoe.models import MegatronParallel, head_blocks
from asyncmoe.models.attention import Grouped
from asyncmoe.models.latent import Latent, head_dims
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.shape import Shape
from asyncmoe.reshard.layout import ITEM_BYTES

IMBALANCE = 1.5
"""Rows of the busiest expert-parallel rank, in units of an even share; at most the number of such ranks."""
_FLOAT32 = 4


@dataclass(frozen=True)
class Microbatch:
    """A micro-batch and how it is computed.

    Attributes:
        rows: rows of the micro-batch on a rank, padding included; with context parallelism, a share of all.
        recompute: keep only the input of each layer, and recompute the layer in the backward pass.
        modules: without `recompute`, the parts of a layer that are recomputed, by Megatron's names (`trainer.recompute_modules`).
        dtype: dtype of the model.
        adapter: the adapter that is trained in place of the weights, if any.
        support: maximum ids that a token was sampled from, if they are kept, and twice the top ids.
        cpu: the trainer runs on CPUs, where blocks of logits are smaller.
        cp: context-parallel ranks among which the micro-batch is divided.
    """

    rows: int
    recompute: bool
    dtype: str = "bfloat16"
    adapter: Kind | None = None
    support: int = 0
    cpu: bool = False
    cp: int = 1
    modules: tuple[str, ...] = ()

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]


def held_layers(m: Shape, parallel: MegatronParallel, rank: int) -> list[int]:
    """Return the layer numbers of a rank."""
    return [layer for chunk in parallel.chunk_layers(m.layers, rank) for layer in chunk]


def kept(m: Shape, parallel: MegatronParallel, stage: int, pass_: Microbatch) -> int:
    """Return the peak bytes that a rank of a pipeline stage keeps for all micro-batches in flight."""
    layers = held_layers(m, parallel, stage * parallel.tp * parallel.dp)
    if pass_.recompute:
        whole = len(layers) * pass_.item * m.hidden * pass_.rows // parallel.tp
    else:
        each = {dense: layer(m, parallel, pass_, dense) - recomputed(m, parallel, pass_, dense) for dense in (False, True)}
        whole = sum(each[number in m.dense_layers] for number in layers)
    return int(whole * _under_way(parallel, stage))


def _under_way(parallel: MegatronParallel, stage: int) -> float:
    """Return the maximum number of a stage's micro-batches between forward and backward, in units of all its chunks (Megatron's 1F1B and
    interleaved schedules, `get_pp_rank_microbatches` of pipeline_parallel/schedules.py); assumes that a step has that many
    micro-batches."""
    after = parallel.pp - 1 - stage
    if parallel.vpp == 1:
        return 1 + after
    return (2 * after + (parallel.vpp - 1) * parallel.pp + 1) / parallel.vpp


def layer(m: Shape, parallel: MegatronParallel, pass_: Microbatch, dense: bool) -> int:
    """Return the bytes that one layer keeps for one micro-batch without recomputation."""
    return _attention(m, parallel.tp, pass_) + (_mlp(m, parallel.tp, pass_) if dense else _experts(m, parallel, pass_))


def recomputed(m: Shape, parallel: MegatronParallel, pass_: Microbatch, dense: bool) -> int:
    """Return the bytes of a layer's activations that are not kept, because `modules` are recomputed in the backward pass.

    Each recomputed part keeps its input, which the previous operation keeps as its output (`CheckpointWithoutOutput` and `checkpoint` of
    Megatron's tensor_parallel/random.py, where transformer_layer.py, attention.py, multi_latent_attention.py and moe_layer.py call them).
    """
    modules, here = pass_.modules, pass_.rows // parallel.tp
    found = 0
    if "layernorm" in modules:
        found += here * pass_.item * 2 * 2 * m.hidden  # both norms' normalized inputs and outputs
    key, value = head_dims(m)
    if isinstance(m.attention, Latent) and "mla_up_proj" in modules:
        found += here * pass_.item * m.heads * (2 * key + value)
    if "core_attn" in modules:
        found += here * pass_.item * m.heads * value  # the kernel's kept output
    if dense:
        return found + (_mlp(m, parallel.tp, pass_) - here * pass_.item * 3 * m.hidden if "mlp" in modules else 0)
    if not m.experts:
        return found
    if "moe" in modules:
        return found + _experts(m, parallel, pass_) - here * pass_.item * 3 * m.hidden
    if "moe_act" in modules:
        found += int(expert_rows(m, parallel, pass_) * 4 * m.expert_width // parallel.etp * pass_.item)
    return found + (here * pass_.item * 5 * m.shared_width if "shared_experts" in modules else 0)


def _attention(m: Shape, tp: int, pass_: Microbatch) -> int:
    norm = 3 * m.hidden  # input, normalized input, output
    heads, angles = _latent(m, m.attention) if isinstance(m.attention, Latent) else _grouped(m)
    low_rank = _ranks(pass_, ATTENTION)
    return pass_.rows * pass_.item * (norm + heads + (angles + low_rank) * tp) // tp


def _grouped(m: Shape) -> tuple[int, int]:
    """Return the entries per row that tensor-parallel ranks shard, and the sines and cosines of queries and keys on every rank."""
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    kind = m.attention if isinstance(m.attention, Grouped) else Grouped()
    joint = q + 2 * kv
    normed = 2 * q + kv if kind.qk_norm else 0  # the input of the keys' norm is part of `joint`
    rotated = q + kv
    given = 2 * q  # the kernel's kept output, and the output projection's input
    return joint + normed + rotated + given, int(4 * m.head_dim * kind.rotary)


def _latent(m: Shape, kind: Latent) -> tuple[int, int]:
    """Return the same as `_grouped` for latent attention. The kernel keeps copies of queries and keys, concatenated from two parts, and of
    values, split from keys."""
    small = 3 * (kind.q_rank or 0) + 3 * kind.kv_rank + kind.rope
    each = 2 * (kind.nope + kind.rope) + kind.value + 2 * kind.value  # the last two as in `_grouped`
    return small + m.heads * each, 4 * kind.rope


def _mlp(m: Shape, tp: int, pass_: Microbatch) -> int:
    return pass_.rows * pass_.item * (3 * m.hidden + 5 * m.dense_width + _ranks(pass_, MLP) * tp) // tp


def _experts(m: Shape, parallel: MegatronParallel, pass_: Microbatch) -> int:
    here = pass_.rows // parallel.tp
    router = 5 * m.experts + 20 * m.experts_per_token  # bytes: float32 scores, a mask of the experts, indices and weights of the chosen
    if m.router_bias:
        router += 4 * m.experts  # sigmoid scores in addition to their logits
    row = m.hidden + 6 * m.expert_width // parallel.etp + _ranks(pass_, MLP)
    shared = 5 * m.shared_width + _ranks(pass_, MLP) * parallel.tp if m.shared_width else 0
    return here * ((3 * m.hidden + shared) * pass_.item + router) + int(expert_rows(m, parallel, pass_) * row * pass_.item)


def expert_rows(m: Shape, parallel: MegatronParallel, pass_: Microbatch) -> float:
    """Return the rows of a rank's experts in a layer."""
    return pass_.rows / parallel.tp * m.experts_per_token * parallel.etp * min(IMBALANCE, parallel.ep)


def _ranks(pass_: Microbatch, targets: tuple[str, ...]) -> int:
    kind = pass_.adapter
    return 0 if kind is None else kind.rank * len(set(kind.targets) & set(targets))


def working(m: Shape, parallel: MegatronParallel, stage: int, pass_: Microbatch) -> int:
    """Return the peak bytes that a backward pass needs besides the kept ones: the larger of what one layer and what the output layer needs.
    On CPUs, include the rotary angles of all rows, which layers share, and the norm before the output layer."""
    kinds = {number in m.dense_layers for number in held_layers(m, parallel, stage * parallel.tp * parallel.dp)}
    most = max((_layer_backward(m, parallel, pass_, dense) for dense in kinds), default=0)
    if stage == parallel.pp - 1:
        norm = 2 * m.hidden * pass_.rows // parallel.tp * pass_.item if pass_.cpu else 0  # the norm's input and output
        most = max(most, norm + head(m, parallel, pass_))
    return most + (_angles(m, pass_) if pass_.cpu else 0)


def _angles(m: Shape, pass_: Microbatch) -> int:
    kind = m.attention if isinstance(m.attention, Grouped) else None
    return 0 if kind is None else int(pass_.rows * pass_.cp * m.head_dim * kind.rotary) * _FLOAT32


def _layer_backward(m: Shape, parallel: MegatronParallel, pass_: Microbatch, dense: bool) -> int:
    """Return the bytes of the gradients of a layer's activations, of its recomputed activations, and of its largest weight's gradient
    before it is accumulated."""
    of_weights = 0 if pass_.adapter is not None else _largest_weight(m, parallel, dense, pass_.cpu) * pass_.item
    again = layer(m, parallel, pass_, dense) if pass_.recompute else recomputed(m, parallel, pass_, dense)
    if pass_.cpu:
        return again + of_weights + _backward_on_cpu(m, parallel, pass_, dense)
    return layer(m, parallel, pass_, dense) + again + of_weights + gathered(m, parallel, pass_)


def _backward_on_cpu(m: Shape, parallel: MegatronParallel, pass_: Microbatch, dense: bool) -> int:
    """Return the peak bytes of gradients in a layer's backward pass, less those of activations freed by then.

    The pass begins with the output's gradient. From the gradient of a gated MLP's product the gradients of its two factors are then
    computed, before anything but the product is freed. A mixture of experts holds inputs or outputs of all its experts three times while
    sorting them, or the gradients of their outputs while the experts run one after another as MLPs. When attention begins, the MLP's
    activations have been freed.
    """
    here, item = pass_.rows // parallel.tp, pass_.item
    gradient = here * item * m.hidden + (pass_.rows * item * m.hidden if parallel.tp > 1 else 0)  # gathered for weights
    if dense:
        mlp, freed = 2 * here * item * m.dense_width, _mlp(m, parallel.tp, pass_)
    else:
        rows, one = expert_rows(m, parallel, pass_), min(1.0, IMBALANCE / (m.experts // parallel.ep))
        product = one * 2 * m.expert_width // parallel.etp
        mlp, freed = int(rows * item * max(3 * m.hidden, m.hidden + product)), _experts(m, parallel, pass_)
    return gradient + max(mlp, _attention_on_cpu(m, parallel, pass_) - freed)


def _attention_on_cpu(m: Shape, parallel: MegatronParallel, pass_: Microbatch) -> int:
    """Return the bytes of attention's gradients: those of its output, and those of queries, keys and values, both as the kernel returns
    them and concatenated.

    Context-parallel ranks have the gradients of a block's keys and values for every query head, before the heads that share them are
    summed (`asyncmoe.platform.megatron.context_attention`); the longest block, if the micro-batch is one sequence, has all rows but a
    chunk.
    """
    query, shared = (heads * max(head_dims(m)) for heads in (m.heads, m.kv_heads))
    entries = pass_.rows * pass_.item // parallel.tp
    if pass_.cp == 1:
        return entries * (query + 2 * (query + 2 * shared))
    block = (2 * pass_.cp - 1) / 2  # in units of a rank's rows
    return gathered(m, parallel, pass_) + int(entries * (4.5 * query + block * (2 * query + shared)))


def gathered(m: Shape, parallel: MegatronParallel, pass_: Microbatch) -> int:
    """Return the bytes of the keys and values of all context-parallel ranks that a rank holds while a layer attends.

    Transformer Engine's ring receives one block after another, each into a buffer of its own, and frees them together
    (`AttnFuncWithCPAndKVP2P`). On CPUs, where models are float32, keys and values are gathered, and the backward pass also holds the
    gradients of all of them (`asyncmoe.platform.megatron.context_attention`).
    """
    if pass_.cp == 1:
        return 0
    # In float32: keys, values padded to their width, and the gradients of both.
    width = 4 * max(head_dims(m)) if pass_.item == _FLOAT32 else sum(head_dims(m))
    return pass_.rows * pass_.cp * m.kv_heads * width // parallel.tp * pass_.item


def _largest_weight(m: Shape, parallel: MegatronParallel, dense: bool, cpu: bool) -> int:
    """Return the number of entries of a layer's largest weight on a rank; on a GPU the experts' weights count as one, because one operation
    uses all of them."""
    attention = max(prod(shape) for shape in m.attention.shapes(m).values()) // parallel.tp
    if dense:
        return max(attention, 2 * m.hidden * m.dense_width // parallel.tp)
    experts = (1 if cpu else m.experts // parallel.ep) * m.expert_width // parallel.etp
    return max(attention, 2 * m.hidden * experts, 2 * m.hidden * m.shared_width // parallel.tp)


def head(m: Shape, parallel: MegatronParallel, pass_: Microbatch, entropy: bool = True) -> int:
    """Return the peak bytes of the output layer with the log-probabilities (`asyncmoe.trainer.model.logprobs`).

    The peak is the layer's kept bytes, plus the larger of two: the blocks of the forward pass, or the blocks of the backward pass with the
    gradient of the layer's input, which is summed in float32. The weight's gradient is added directly to data parallelism's buffer.

    Args:
        entropy: the entropy is computed, too, as in training.
    """
    rows, vocab = pass_.rows, m.vocab // parallel.tp
    ids = head_blocks.width(rows, vocab, pass_.cpu)
    exact = pass_.item == _FLOAT32
    kept = rows * (m.hidden * pass_.item + 12 + (1 + 12 * pass_.support if pass_.support else 0))
    blocks = rows * ids * (_FLOAT32 if exact else _FLOAT32 + pass_.item)
    forward = blocks + (rows * ids * _FLOAT32 if entropy else 0)
    products = 0 if exact else m.hidden * pass_.item * (rows if pass_.adapter is not None else max(rows, ids))
    return kept + max(forward, blocks + rows * m.hidden * _FLOAT32 + products)
