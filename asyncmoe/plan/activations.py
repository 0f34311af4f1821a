"""What a trainer rank's micro-batches take while they are gone through: a formula, term by term.

It counts what each operation of a layer keeps for the backward pass, as Korthikanti et al. do in "Reducing Activation Recomputation in
Large Transformer Models" (arXiv 2205.05198): their layer keeps 34 s b h / t bytes with tensor and sequence parallelism of t besides the
scores (eq. 4; attention kernels that keep no scores leave it at that), 2 s b h / t where whole layers are recomputed, and the first of p
stages has p micro-batches under way (section 4.2.3). Theirs is one of heads without groups, a MLP of 4 h, and dropout. Here:

- s b is the rows of one micro-batch, packed; attention has grouped queries, norms of them where the model has those, and rotary angles of
  the dimensions that rotate; nothing is dropped;
- latent attention keeps a small vector three times, as a norm does, the part of the key that all heads share once, and of each head its
  query, its key, its value, and twice what comes of them; what leads down to the small vectors is given what the norm before it gives;
- a gated MLP of width f keeps 5 f a row: gate and up, silu of the gate, up as it is multiplied, and the product;
- a mixture of experts keeps, for a row and each of its k experts, the h that the expert is given and 6 f, the product once before and
  once after the router's weight; it multiplies by the experts' share of rows, which is not even; experts that all tokens pass are a MLP
  that is given the same h;
- adapters keep their low-rank rows.

The terms are those of Megatron's unfused layers, and a test holds them against what torch saves. Fused kernels keep less.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from asyncmoe.config.lora import ATTENTION, MLP
from asyncmoe.models import MegatronParallel
from asyncmoe.models.attention import Grouped
from asyncmoe.models.latent import Latent
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.shape import Shape
from asyncmoe.reshard.layout import ITEM_BYTES

IMBALANCE = 1.5
"""Rows the busiest expert-parallel rank gets, over an even share; there are at most as many times more as there are ranks."""
_FLOAT_ROWS = 1024
"""Rows of logits in float32 at a time, and ... (`asyncmoe.trainer.model.logprobs`)"""
_FLOAT_COPIES = 3
"""... copies of them."""


@dataclass(frozen=True)
class Microbatch:
    """What a pass is like.

    Attributes:
        rows: of a micro-batch, padding included.
        recompute: keep the input of each layer alone, and compute the layer again on the way back.
        dtype: of the model.
        adapter: what is trained in place of the weights.
        unmasked: probabilities over the whole vocabulary are asked for besides those of the objective.
    """

    rows: int
    recompute: bool
    dtype: str = "bfloat16"
    adapter: Kind | None = None
    unmasked: bool = False

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]


def kept(m: Shape, parallel: MegatronParallel, stage: int, pass_: Microbatch) -> int:
    """Bytes that a rank of a pipeline stage keeps of all micro-batches under way, when they are most."""
    layers = [layer for chunk in parallel.chunk_layers(m.layers, stage * parallel.tp * parallel.dp) for layer in chunk]
    if pass_.recompute:
        whole = len(layers) * pass_.item * m.hidden * pass_.rows // parallel.tp
    else:
        whole = sum(layer(m, parallel, pass_, number in m.dense_layers) for number in layers)
    return int(whole * _under_way(parallel, stage))


def _under_way(parallel: MegatronParallel, stage: int) -> float:
    """Micro-batches a stage has gone forward and not yet back through, in units of all its chunks (Megatron's 1F1B and interleaved
    schedules, `get_pp_rank_microbatches` of pipeline_parallel/schedules.py); the whole step is assumed to have as many."""
    after = parallel.pp - 1 - stage
    if parallel.vpp == 1:
        return 1 + after
    return (2 * after + (parallel.vpp - 1) * parallel.pp + 1) / parallel.vpp


def layer(m: Shape, parallel: MegatronParallel, pass_: Microbatch, dense: bool) -> int:
    """Bytes one layer keeps of one micro-batch where it is not recomputed."""
    return _attention(m, parallel.tp, pass_) + (_mlp(m, parallel.tp, pass_) if dense else _experts(m, parallel, pass_))


def _attention(m: Shape, tp: int, pass_: Microbatch) -> int:
    norm = 3 * m.hidden  # what it is given, that divided by its size, what it gives
    heads, angles = _latent(m, m.attention) if isinstance(m.attention, Latent) else _grouped(m)
    low_rank = _ranks(pass_, ATTENTION)
    return pass_.rows * pass_.item * (norm + heads + (angles + low_rank) * tp) // tp


def _grouped(m: Shape) -> tuple[int, int]:
    """Entries a row that tensor-parallel ranks share, and sines and cosines of queries and keys, which every rank has."""
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    kind = m.attention if isinstance(m.attention, Grouped) else Grouped()
    joint = q + 2 * kv
    normed = 2 * q + kv if kind.qk_norm else 0  # the keys' input is a part of `joint`
    rotated = q + kv
    given = 2 * q  # by the kernel, which keeps its output, and to the output projection
    return joint + normed + rotated + given, int(4 * m.head_dim * kind.rotary)


def _latent(m: Shape, kind: Latent) -> tuple[int, int]:
    """The same. Queries and keys are put together of their two parts, values are cut off from the keys: the kernel has copies of all."""
    small = 3 * (kind.q_rank or 0) + 3 * kind.kv_rank + kind.rope
    each = 2 * (kind.nope + kind.rope) + kind.value + 2 * kind.value  # the last two as in `_grouped`
    return small + m.heads * each, 4 * kind.rope


def _mlp(m: Shape, tp: int, pass_: Microbatch) -> int:
    return pass_.rows * pass_.item * (3 * m.hidden + 5 * m.dense_width + _ranks(pass_, MLP) * tp) // tp


def _experts(m: Shape, parallel: MegatronParallel, pass_: Microbatch) -> int:
    here = pass_.rows // parallel.tp
    router = 5 * m.experts + 20 * m.experts_per_token  # bytes: float32 scores, a mark for each expert, places and weights of the chosen
    if m.router_bias:
        router += 4 * m.experts  # sigmoid scores besides those they are of
    row = m.hidden + 6 * m.expert_width // parallel.etp + _ranks(pass_, MLP)
    shared = 5 * m.shared_width + _ranks(pass_, MLP) * parallel.tp if m.shared_width else 0
    return here * ((3 * m.hidden + shared) * pass_.item + router) + int(expert_rows(m, parallel, pass_) * row * pass_.item)


def expert_rows(m: Shape, parallel: MegatronParallel, pass_: Microbatch) -> float:
    """Rows that a rank's experts get in a layer."""
    return pass_.rows / parallel.tp * m.experts_per_token * parallel.etp * min(IMBALANCE, parallel.ep)


def _ranks(pass_: Microbatch, targets: tuple[str, ...]) -> int:
    kind = pass_.adapter
    return 0 if kind is None else kind.rank * len(set(kind.targets) & set(targets))


def working(m: Shape, parallel: MegatronParallel, stage: int, pass_: Microbatch) -> int:
    """Bytes besides those kept, at the worst moment of a backward pass: of the layer it is in, or of the logits, which are gone by then."""
    held = [chunk for chunk in parallel.chunk_layers(m.layers, stage * parallel.tp * parallel.dp) if len(chunk)]
    kinds = {number in m.dense_layers for chunk in held for number in chunk}
    most = max((_layer_backward(m, parallel, pass_, dense) for dense in kinds), default=0)
    return max(most, _logits(m, parallel, pass_)) if stage == parallel.pp - 1 else most


def _layer_backward(m: Shape, parallel: MegatronParallel, pass_: Microbatch, dense: bool) -> int:
    """Gradients of all that the layer keeps, what it keeps itself where it is computed again, and gradients of its largest weight before
    they are added to those of the step."""
    of_weights = 0 if pass_.adapter is not None else _largest_weight(m, parallel, dense) * pass_.item
    return layer(m, parallel, pass_, dense) * (2 if pass_.recompute else 1) + of_weights


def _largest_weight(m: Shape, parallel: MegatronParallel, dense: bool) -> int:
    """Entries on a rank; the experts' weights count as one, as they are multiplied."""
    attention = max(prod(shape) for shape in m.attention.shapes(m).values()) // parallel.tp
    if dense:
        return max(attention, 2 * m.hidden * m.dense_width // parallel.tp)
    experts = m.experts // parallel.ep * m.expert_width // parallel.etp
    return max(attention, 2 * m.hidden * experts, 2 * m.hidden * m.shared_width // parallel.tp)


def _logits(m: Shape, parallel: MegatronParallel, pass_: Microbatch) -> int:
    """Logits and a gradient for each use of them, slices of them in float32, what they are made from, gradients of their weight."""
    vocab = m.vocab // parallel.tp
    uses = 2 if pass_.unmasked else 1
    weight = 0 if pass_.adapter is not None else vocab * m.hidden * pass_.item
    slices = _FLOAT_COPIES * 4 * min(_FLOAT_ROWS, pass_.rows) * vocab
    return pass_.rows * pass_.item * ((1 + uses) * vocab + m.hidden) + slices + weight
