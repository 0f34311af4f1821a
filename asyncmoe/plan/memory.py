"""What a GPU of the trainer, and one of an engine, has to hold: arithmetic over layouts, from a configuration alone.

Parameters are counted in the layouts that weights are loaded and moved by (`asyncmoe.models`), so they are exact. Gradients and the
optimizer's state are what Megatron keeps of them (`asyncmoe.trainer.model.gpt`, `asyncmoe.trainer.model.optimizer`); a test holds them
against the
real ones. Activations are a formula (`asyncmoe.plan.activations`), an engine's working memory is SGLang's own estimate, and what drivers,
communicators and the allocator take besides is left to the part of a GPU that is not planned for (`USABLE`). No figure has been
measured on a GPU.

Bytes; 1 GB is 1e9 of them. A GPU that is sold as one of 80 GB has 85.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.latent import Latent
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.lora.halves import layer_halves
from asyncmoe.models.payload import Payload
from asyncmoe.models.shape import Shape
from asyncmoe.plan import activations
from asyncmoe.plan.activations import Microbatch
from asyncmoe.reshard.layout import ITEM_BYTES, RankLayout
from asyncmoe.rollout.engines.adapters import SLOTS

USABLE = 0.95
"""Share of a GPU's memory that is planned for. The rest is for CUDA's context, NCCL's channels, and memory that is free in pieces."""
GRADIENT = 4
"""Bytes of a parameter's gradient: they are summed in float32 (`grad_reduce_in_fp32`), whatever the model is in."""
BUFFERS = 2
"""Buckets of messages under way (`asyncmoe.reshard.exchange`)."""
_EXPERTS = ".experts."
_BIAS = ("router_bias", "router.expert_bias")
"""Ends of the names, as tensors and Megatron's, of what routers choose by: float32 and without gradients."""
_MB = 1 << 20

Hf = Mapping[str, Any]


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on one GPU, by what they are for."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, gpu_gb: float) -> bool:
        """It is no more than is planned for on a GPU."""
        return self.total <= usable(gpu_gb)


def usable(gpu_gb: float) -> int:
    """Bytes of a GPU that are planned for."""
    return int(USABLE * gpu_gb * 1e9)


@dataclass(frozen=True)
class Training:
    """What of a run decides how much a trainer's GPU holds, besides the model and its sizes.

    Attributes:
        microbatch: see there.
        distributed: the optimizer's state is shared out over data-parallel ranks.
        reference: there is a reference policy.
        bucket_bytes: `sync.bucket_bytes`.
        communicators: bytes of those by which weights travel (`asyncmoe.reshard.nccl_room`).
    """

    microbatch: Microbatch
    distributed: bool = True
    reference: bool = False
    bucket_bytes: int = 256 << 20
    communicators: int = 0


@dataclass(frozen=True)
class EngineMemory:
    """The same of an engine.

    Attributes:
        tokens: of the KV cache.
        staging: a version is received into memory of its own.
        prefill: tokens of a prefill at once (--chunked-prefill-size).
        running: requests at once.
        adapter: what is trained in place of the weights.
        gpu: it runs on one; else it is given no working memory, which SGLang estimates of GPUs only.
        communicators: as of `Training`.
    """

    tokens: int
    staging: bool = True
    prefill: int = 8192
    running: int = 256
    dtype: str = "bfloat16"
    adapter: Kind | None = None
    bucket_bytes: int = 256 << 20
    gpu: bool = True
    communicators: int = 0


@dataclass(frozen=True)
class RankParameters:
    """Parameters of a rank.

    Attributes:
        dense: those that data-parallel ranks have equal copies of.
        experts: those that expert-data-parallel ranks have.
        nbytes: all of them, in the dtypes they are in, and what has no gradient.
        copies: bytes of those that are sent to engines in another dtype than they are in.
    """

    dense: int = 0
    experts: int = 0
    nbytes: int = 0
    copies: int = 0

    @property
    def all(self) -> int:
        return self.dense + self.experts


def trainer(hf: Hf, parallel: MegatronParallel, training: Training) -> tuple[GpuMemory, ...]:
    """What a rank of each pipeline stage holds; ranks of a stage hold equally much.

    Raises:
        ConfigError: sizes that do not divide the model.
    """
    return tuple(_stage(hf, parallel, training, stage) for stage in range(parallel.pp))


def _stage(hf: Hf, parallel: MegatronParallel, training: Training, stage: int) -> GpuMemory:
    m, pass_ = family_of(hf).shape_of(hf), training.microbatch
    rank = stage * parallel.tp * parallel.dp
    weights = weights_of(hf, parallel, rank, pass_.dtype)
    adapters = RankParameters() if pass_.adapter is None else adapters_of(m, pass_.adapter, parallel, rank, pass_.dtype)
    trained = weights if pass_.adapter is None else adapters
    parts = {
        "weights": weights.nbytes,
        "adapters": adapters.nbytes,
        "gradients": trained.all * GRADIENT,
        "optimizer": optimizer_bytes(trained, parallel, training),
        # `SecondCopy.in_place`: a second copy of the weights, on the host but for the time of its forward passes
        "reference": weights.nbytes if training.reference and pass_.adapter is None else 0,
        "activations": activations.kept(m, parallel, stage, pass_),
        "working set": activations.working(m, parallel, stage, pass_),
        # of adapters a copy is sent (`Snapshot`), and of weights in other dtypes (`Sources`)
        "weight sync": BUFFERS * training.bucket_bytes
        + training.communicators
        + (weights.copies if pass_.adapter is None else adapters.nbytes),
    }
    return GpuMemory({name: nbytes for name, nbytes in parts.items() if nbytes})


def optimizer_bytes(trained: RankParameters, parallel: MegatronParallel, training: Training) -> int:
    """Adam's two moments in float32, and in float32 the weights themselves where the model is not: 12 or 8 bytes a parameter."""
    each = 8 + (0 if training.microbatch.dtype == "float32" else 4)
    if not training.distributed:
        return trained.all * each
    return (-(-trained.dense // parallel.dp) + -(-trained.experts // expert_data_parallel(parallel))) * each


def expert_data_parallel(parallel: MegatronParallel) -> int:
    """Ranks with the same experts."""
    return parallel.dp if parallel.ep == 1 else parallel.tp * parallel.dp // (parallel.ep * parallel.etp)


def whole(hf: Hf) -> RankParameters:
    """The parameters of the model, each once; bytes are not counted."""
    sizes = {name: prod(shape) for name, shape in family_of(hf).tensors(hf).items() if not name.endswith(_BIAS)}
    experts = sum(size for name, size in sizes.items() if _EXPERTS in name)
    return RankParameters(sum(sizes.values()) - experts, experts)


def weights_of(hf: Hf, parallel: MegatronParallel, rank: int, dtype: str) -> RankParameters:
    """A trainer rank's weights. Megatron reduces those of experts apart only where they are divided over ranks."""
    layout = family_of(hf).megatron_layout(hf, parallel, rank, dtype)
    dense = experts = biases = copies = 0
    for name, size, sent in _sizes(layout):
        if name.endswith(_BIAS):
            biases += size * ITEM_BYTES[sent]
        elif _EXPERTS in name and parallel.ep > 1:
            experts += size
        else:
            dense += size
            copies += size * ITEM_BYTES[sent] if sent != dtype else 0
    return RankParameters(dense, experts, (dense + experts) * ITEM_BYTES[dtype] + biases, copies)


def adapters_of(m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, dtype: str) -> RankParameters:
    """A trainer rank's adapters."""
    counted = {True: 0, False: 0}
    for _, layers in m.runs(range(m.layers)):
        held = [layer for chunk in parallel.chunk_layers(m.layers, rank) for layer in chunk if layer in layers]
        for half in layer_halves(m, kind, parallel, rank, layers[0] in m.dense_layers):
            counted[half.expert_data] += len(held) * prod(half.shape)
    return RankParameters(counted[False], counted[True], sum(counted.values()) * ITEM_BYTES[dtype])


def engine(hf: Hf, parallel: EngineParallel, serving: EngineMemory) -> GpuMemory:
    """What the engine's rank with the most holds.

    Raises:
        ConfigError: sizes that do not divide the model.
    """
    return max((_engine_stage(hf, parallel, serving, stage) for stage in range(parallel.pp)), key=lambda memory: memory.total)


def _engine_stage(hf: Hf, parallel: EngineParallel, serving: EngineMemory, stage: int) -> GpuMemory:
    rank = stage * parallel.tp
    weights = _nbytes(Payload(hf).weights_of_engine(parallel, rank, serving.dtype))
    slot = 0 if serving.adapter is None else _nbytes(Payload(hf, serving.adapter).engines(parallel, serving.dtype)[rank])
    parts = {
        "weights": weights,
        "adapters": SLOTS * slot,
        "derived": _derived(hf, parallel, serving.dtype, rank),
        "staging": 0 if not serving.staging else weights if serving.adapter is None else slot,
        "KV cache": serving.tokens * kv_bytes(hf, parallel, serving.dtype, rank),
        "working set": _working(parallel, serving),
        "weight sync": BUFFERS * serving.bucket_bytes + serving.communicators,
    }
    return GpuMemory({name: nbytes for name, nbytes in parts.items() if nbytes})


def kv_bytes(hf: Hf, parallel: EngineParallel, dtype: str, rank: int = 0) -> int:
    """Bytes of the KV cache that a token takes on an engine's rank; ranks beyond the number of key heads have copies. Of latent attention
    every rank has the small vector and the part of the key that all heads share, once."""
    m = family_of(hf).shape_of(hf)
    if isinstance(m.attention, Latent):
        entries = m.attention.kv_rank + m.attention.rope
    else:
        entries = 2 * max(1, m.kv_heads // parallel.attention_tp) * m.head_dim
    return len(parallel.layers(m.layers, rank)) * entries * ITEM_BYTES[dtype]


def _derived(hf: Hf, parallel: EngineParallel, dtype: str, rank: int) -> int:
    """What SGLang 0.5.23 keeps of weights besides them: both parts of kv_b_proj, laid out otherwise (`post_load_weights`)."""
    m = family_of(hf).shape_of(hf)
    if not isinstance(m.attention, Latent):
        return 0
    up = prod(m.attention.shapes(m)["kv_b"]) // parallel.attention_tp
    return len(parallel.layers(m.layers, rank)) * up * ITEM_BYTES[dtype]


def kv_room(hf: Hf, parallel: EngineParallel, serving: EngineMemory, gpu_gb: float) -> int:
    """Tokens of KV cache that there is room for beside everything else, whatever `serving.tokens` says; 0: none."""
    left = usable(gpu_gb) - engine(hf, parallel, replace(serving, tokens=0)).total
    return max(0, left) // max(kv_bytes(hf, parallel, serving.dtype, stage * parallel.tp) for stage in range(parallel.pp))


def engine_filled(hf: Hf, parallel: EngineParallel, serving: EngineMemory, gpu_gb: float) -> tuple[GpuMemory, int]:
    """An engine whose KV cache is all that is left of its GPUs, and the cache's tokens."""
    tokens = kv_room(hf, parallel, serving, gpu_gb)
    return engine(hf, parallel, replace(serving, tokens=tokens)), tokens


def _working(parallel: EngineParallel, serving: EngineMemory) -> int:
    """SGLang 0.5.23's own estimate for activations of a prefill and graphs of decoding (arg_groups/memory_hook.py)."""
    if not serving.gpu:
        return 0
    return int((512 + 1.5 * max(serving.prefill, 2048) + parallel.world / 8 * 1024 + 2 * serving.running) * _MB)


def _sizes(layout: RankLayout) -> Iterator[tuple[str, int, str]]:
    """Names within their layer, elements in all layers that are alike, and the dtype they are sent in."""
    for block in layout.blocks:
        yield from ((name, storage.size * len(block.prefixes), storage.dtype) for name, storage in block.storages.items())


def _nbytes(layout: RankLayout) -> int:
    return sum(storage.nbytes * len(block.prefixes) for block in layout.blocks for storage in block.storages.values())
