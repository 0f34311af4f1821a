"""Memory of a trainer's GPU and of an engine's GPU, computed from layouts and thus from a configuration alone.

Parameters are exact, because they are counted in the layouts that are used to load and move weights (`asyncmoe.models`). Gradients and
optimizer state follow Megatron (`asyncmoe.trainer.model.gpt`, `asyncmoe.trainer.model.optimizer`); a test compares them with the real
ones. Activations are a formula (`asyncmoe.plan.activations`), an engine's working memory is SGLang's own estimate, and drivers, other
communicators and the allocator use the unplanned part of a GPU (`USABLE`). Nothing has been measured on a GPU.

Sizes are in bytes, and 1 GB is 1e9 bytes. A GPU sold with 80 GB has 85 GB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from asyncmoe.engines.adapters import SLOTS
from asyncmoe.errors import LayoutError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of, shape_of
from asyncmoe.models.latent import Latent
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.lora.halves import layer_halves
from asyncmoe.models.payload import Payload
from asyncmoe.models.shape import Shape
from asyncmoe.plan import activations
from asyncmoe.plan.activations import Microbatch
from asyncmoe.reshard.layout import ITEM_BYTES, RankLayout

USABLE = 0.95
"""Planned share of a GPU's memory. The rest is for CUDA's context, NCCL's channels, and fragmentation."""
ASLEEP = 2 * 10**9
"""Planned bytes of a GPU that another process keeps while it sleeps: CUDA's context with loaded kernels, cuBLAS's workspaces, and NCCL's
channels. A context alone takes 0.55 GB of an H200 (benchmarks/results/bundle-2026-11-26-nvidia-h200.json); the rest is not measured."""
MARGIN = 0.25
"""Share of a trainer's activations and working set that a proposal also keeps free. Their formula was within 2 % of Megatron on a CPU, but
has not been compared with a GPU, where kernels and the allocator decide. All else is exact or, for engines, SGLang's own estimate."""
GRADIENT = 4
"""Bytes of a parameter's gradient, which is reduced in float32 (`grad_reduce_in_fp32`) whatever the model's dtype."""
BUFFERS = 2
"""Buckets of messages in flight (`asyncmoe.reshard.exchange`)."""
LEAST = 8
"""Fewest conversations that should fit into an engine's KV cache."""
ROUTES = "keep.routing"
_EXPERTS = ".experts."
_BIAS = ("router_bias", "router.expert_bias")
"""Suffixes of the router bias in tensor names and in Megatron's names; it is float32 and has no gradient."""
_MB = 1 << 20

Hf = Mapping[str, Any]


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on one GPU, by purpose.

    Attributes:
        host: bytes of host memory that the GPU's process may need, by the configuration key that requires them.
    """

    parts: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def margin(self) -> int:
        """Bytes that a proposal keeps free beside a trainer's total."""
        return int(MARGIN * (self.parts.get("activations", 0) + self.parts.get("working set", 0)))

    def fits(self, gpu_gb: float) -> bool:
        """Return whether the total fits into the planned memory of a GPU."""
        return self.total <= usable(gpu_gb)


def usable(gpu_gb: float) -> int:
    """Return the planned bytes of a GPU."""
    return int(USABLE * gpu_gb * 1e9)


@dataclass(frozen=True)
class Training:
    """The settings of a run, other than the model and the parallel sizes, that determine a trainer GPU's memory.

    Attributes:
        microbatch: micro-batch and recomputation, see `Microbatch`.
        distributed: the optimizer's state is sharded over data-parallel ranks.
        reference: the run has a reference policy.
        bucket_bytes: `sync.bucket_bytes`.
        communicators: bytes of the communicator that moves weights (`asyncmoe.reshard.nccl.CTA_BYTES`).
        delta_base: the rank keeps a copy of what it sent last on this GPU, to send only later changes (`sync.delta`).
        averages: bytes of each of Adam's two averages (`trainer.memory.exp_avg_dtype` and `exp_avg_sq_dtype`).
        offload: share of the optimizer's state that is in host memory (`trainer.memory.optimizer_offload`).
        float8_edges: all layers compute in float8 except this many at either end; None: no layer does.
    """

    microbatch: Microbatch
    distributed: bool = True
    reference: bool = False
    bucket_bytes: int = 256 << 20
    communicators: int = 0
    delta_base: bool = False
    averages: tuple[int, int] = (4, 4)
    offload: float = 0.0
    float8_edges: int | None = None

    @property
    def state(self) -> int:
        """Bytes of a parameter's state: Adam's averages, and float32 weights unless the model is float32."""
        return sum(self.averages) + (0 if self.microbatch.dtype == "float32" else 4)


@dataclass(frozen=True)
class EngineMemory:
    """The settings of a run, other than the model and the parallel sizes, that determine an engine GPU's memory.

    Attributes:
        tokens: tokens of the engine's KV cache, divided among its groups.
        staged: a whole version waits beside the weights until its commit; else it is written in place, while the engine is paused.
        prefill: tokens of a prefill chunk (--chunked-prefill-size).
        running: concurrent requests.
        adapter: the adapter that is trained in place of the weights, if any.
        gpu: the engine runs on a GPU; without one, working memory is 0, because SGLang estimates it for GPUs only.
        routes: the engine records the experts of each token (`keep.routing`).
        communicators: as in `Training`.
    """

    tokens: int
    staged: bool = True
    prefill: int = 8192
    running: int = 256
    dtype: str = "bfloat16"
    adapter: Kind | None = None
    bucket_bytes: int = 256 << 20
    gpu: bool = True
    communicators: int = 0
    routes: bool = False


@dataclass(frozen=True)
class RankParameters:
    """Parameters of a rank.

    Attributes:
        dense: parameters replicated over data-parallel ranks.
        experts: parameters replicated over expert-data-parallel ranks.
        nbytes: bytes of all parameters in their dtypes, and of the router biases, which have no gradient.
        copies: bytes of the parameters that are sent to engines in a dtype different from their own.
        sent: bytes that the rank sends to an engine, in the engine's dtypes; ranks with the same weights each send a share.
    """

    dense: int = 0
    experts: int = 0
    nbytes: int = 0
    copies: int = 0
    sent: int = 0

    @property
    def all(self) -> int:
        return self.dense + self.experts


def trainer(hf: Hf, parallel: MegatronParallel, training: Training) -> tuple[GpuMemory, ...]:
    """Return the memory of a rank of each pipeline stage; ranks of a stage use equal amounts.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    return tuple(_stage(hf, parallel, training, stage) for stage in range(parallel.pp))


def _stage(hf: Hf, parallel: MegatronParallel, training: Training, stage: int) -> GpuMemory:
    m, pass_ = shape_of(hf), training.microbatch
    rank = stage * parallel.tp * parallel.dp
    weights = weights_of(hf, parallel, rank, pass_.dtype)
    adapters = RankParameters() if pass_.adapter is None else adapters_of(m, pass_.adapter, parallel, rank, pass_.dtype)
    trained = weights if pass_.adapter is None else adapters
    kept = activations.kept(m, parallel, stage, pass_)
    # A second copy of the weights (`trainer.model.reference`); none with adapters, which are switched off instead. On a GPU it is present
    # only during its forward passes, which keep no activations; on CPUs always.
    reference = weights.nbytes if training.reference and pass_.adapter is None else 0
    parts = {
        "weights": weights.nbytes,
        "adapters": adapters.nbytes,
        "gradients": trained.all * GRADIENT,
        "optimizer": optimizer_bytes(trained, parallel, training),
        "reference": reference if pass_.cpu else max(0, reference - kept),
        "float8 weights": 0 if training.float8_edges is None else _float8_weights(m, parallel, rank, training.float8_edges),
        "activations": kept,
        # the larger of a backward pass's and the optimizer step's, during which there are no activations
        "working set": max(activations.working(m, parallel, stage, pass_), _step_copies(trained, parallel, training) - kept),
        "weight sync": BUFFERS * training.bucket_bytes + training.communicators,
        # adapters (`AdapterSources`) and weights sent in a different dtype (`WeightSources`) are copied before they are sent
        "copies to send": weights.copies if pass_.adapter is None else adapters.nbytes,
        # `DeltaEncoder`: what was sent last, the current message, and its encoded form
        "delta base": weights.sent + BUFFERS * min(training.bucket_bytes, weights.sent) if training.delta_base else 0,
    }
    host = {
        # The second copy of a rank's part of a checkpoint: the weights (one rank of each replica writes them) and the optimizer's state,
        # 8 bytes a parameter for Adam's moments, and 4 for float32 weights unless the model itself is float32. A sharded optimizer
        # saves its own float32 weights in any case.
        "trainer.async_save": trained.nbytes
        + (12 * stepped(trained, parallel, training) if training.distributed else trained.all * training.state),
        # In pinned memory: float32 weights, averages and gradients of the parameters that the CPU updates (`HybridDeviceOptimizer`)
        "trainer.memory.optimizer_offload": 16 * offloaded(trained, parallel, training),
        "objective.kl.coefficient": reference,  # the reference is in host memory while it is not in use
    }
    return GpuMemory({name: nbytes for name, nbytes in parts.items() if nbytes}, host)


def optimizer_bytes(trained: RankParameters, parallel: MegatronParallel, training: Training) -> int:
    """Return the bytes of the optimizer's state on a GPU (`Training.state` per parameter), without what is offloaded."""
    return (stepped(trained, parallel, training) - offloaded(trained, parallel, training)) * training.state


def stepped(trained: RankParameters, parallel: MegatronParallel, training: Training) -> int:
    """Return the number of parameters that a rank's optimizer updates: all its own, or its share of parameters replicated over
    data-parallel ranks."""
    return trained.all if not training.distributed else sum(_shares(trained, parallel))


def _shares(trained: RankParameters, parallel: MegatronParallel) -> tuple[int, int]:
    return -(-trained.dense // parallel.dp), -(-trained.experts // expert_data_parallel(parallel))


def offloaded(trained: RankParameters, parallel: MegatronParallel, training: Training) -> int:
    """Return how many of the `stepped` parameters the CPU updates. Megatron offloads whole tensors until this number is reached, so the
    last may exceed it (`HybridDeviceOptimizer._get_sub_optimizer_param_groups`)."""
    return int(training.offload * stepped(trained, parallel, training))


def _step_copies(trained: RankParameters, parallel: MegatronParallel, training: Training) -> int:
    """Return the bytes of float32 copies of averages in bfloat16, which Transformer Engine's Adam makes for all parameters of a group
    before updating them (`FusedAdam.step`). Dense weights and experts have separate optimizers, which step one after the other."""
    return 4 * sum(size < 4 for size in training.averages) * max(_shares(trained, parallel))


def _float8_weights(m: Shape, parallel: MegatronParallel, rank: int, edges: int) -> int:
    """Return the bytes of the float8 copies of a rank's matrices, by rows and by columns, that Transformer Engine keeps during a step; each
    block of 128 x 128 has a float32 scale."""
    matrices = {name: prod(shape) for name, shape in m.attention.shapes(m).items() if len(shape) == 2}
    whole = sum(size for name, size in matrices.items() if name.endswith("_a"))  # down-projections of latent attention
    attention = (sum(matrices.values()) - whole) // parallel.tp + whole
    entries = 0
    for number in activations.held_layers(m, parallel, rank):
        if not edges <= number < m.layers - edges:
            continue
        if number in m.dense_layers:
            entries += attention + 3 * m.hidden * m.dense_width // parallel.tp
        else:
            experts = m.experts // parallel.ep * m.expert_width // parallel.etp
            entries += attention + 3 * m.hidden * (experts + m.shared_width // parallel.tp)
    return 2 * (entries + 4 * entries // (128 * 128))


def expert_data_parallel(parallel: MegatronParallel) -> int:
    """Return the number of ranks with the same experts."""
    return parallel.dp if parallel.ep == 1 else parallel.tp * parallel.dp // (parallel.ep * parallel.etp)


def whole(hf: Hf) -> RankParameters:
    """Return the parameter counts of the whole model, each parameter once; bytes are left at 0."""
    sizes = {name: prod(shape) for name, shape in family_of(hf).tensors(hf).items() if not name.endswith(_BIAS)}
    experts = sum(size for name, size in sizes.items() if _EXPERTS in name)
    return RankParameters(sum(sizes.values()) - experts, experts)


def weights_of(hf: Hf, parallel: MegatronParallel, rank: int, dtype: str) -> RankParameters:
    """Return a trainer rank's weights. Megatron reduces expert gradients separately only with expert parallelism."""
    layout = family_of(hf).megatron_layout(hf, parallel, rank, dtype)
    dense = experts = biases = copies = 0
    sent = 0.0
    for name, size, sent_as in _sizes(layout):
        nbytes, owners = size * ITEM_BYTES[sent_as], parallel.dp
        if name.endswith(_BIAS):
            biases += nbytes
        elif _EXPERTS in name and parallel.ep > 1:
            experts += size
            owners = expert_data_parallel(parallel)
        else:
            dense += size
            copies += nbytes if sent_as != dtype else 0
        sent += nbytes / owners
    return RankParameters(dense, experts, (dense + experts) * ITEM_BYTES[dtype] + biases, copies, round(sent))


def adapters_of(m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, dtype: str) -> RankParameters:
    """Return a trainer rank's adapters."""
    counted = {True: 0, False: 0}
    for _, layers in m.runs(range(m.layers)):
        held = [layer for layer in activations.held_layers(m, parallel, rank) if layer in layers]
        for half in layer_halves(m, kind, parallel, rank, layers[0] in m.dense_layers):
            counted[half.expert_data] += len(held) * prod(half.shape)
    return RankParameters(counted[False], counted[True], sum(counted.values()) * ITEM_BYTES[dtype])


def engine(hf: Hf, parallel: EngineParallel, serving: EngineMemory) -> GpuMemory:
    """Return the memory of an engine's rank; all ranks use equal amounts.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    weights = _nbytes(Payload(hf).weights_of_engine(parallel, 0, serving.dtype))
    slot = 0 if serving.adapter is None else _nbytes(Payload(hf, serving.adapter).engines(parallel, serving.dtype)[0])
    tokens = -(-serving.tokens // parallel.attn_dp)  # of a group's cache
    parts = {
        "weights": weights,
        "adapters": SLOTS * slot,
        "derived": _derived(hf, parallel, serving.dtype),
        "staging": (weights if serving.adapter is None else slot) if serving.staged else 0,
        "KV cache": tokens * kv_bytes(hf, parallel, serving.dtype),
        "working set": _working(parallel, serving),
        "weight sync": BUFFERS * serving.bucket_bytes + serving.communicators,
    }
    m = shape_of(hf)
    # Every rank pins int32[its cache's tokens + a page, layers, top-k] (SGLang 0.5.23: `BaseHostCache` of state_capturer/base.py).
    host = {ROUTES: 4 * tokens * m.layers * m.experts_per_token} if serving.routes else {}
    return GpuMemory({name: nbytes for name, nbytes in parts.items() if nbytes}, host)


def kv_bytes(hf: Hf, parallel: EngineParallel, dtype: str) -> int:
    """Return the KV cache bytes per token on a rank of its group; ranks beyond the number of key heads hold copies. With latent attention,
    every rank of the group holds the compressed vector and the key part shared by all heads."""
    m = shape_of(hf)
    if isinstance(m.attention, Latent):
        entries = m.attention.kv_rank + m.attention.rope
    else:
        entries = 2 * max(1, m.kv_heads // parallel.attn_tp) * m.head_dim
    return m.layers * entries * ITEM_BYTES[dtype]


def _derived(hf: Hf, parallel: EngineParallel, dtype: str) -> int:
    """Return the bytes of the weight copies that SGLang 0.5.23 derives: both parts of kv_b_proj in another layout (`post_load_weights`)."""
    m = shape_of(hf)
    if not isinstance(m.attention, Latent):
        return 0
    up = prod(m.attention.shapes(m)["kv_b"]) // parallel.attn_tp
    return m.layers * up * ITEM_BYTES[dtype]


def kv_room(hf: Hf, parallel: EngineParallel, serving: EngineMemory, gpu_gb: float) -> int:
    """Return the tokens of an engine's KV cache that fit beside everything else, ignoring `serving.tokens`; 0 if none fit, or if the sizes
    split float8 blocks."""
    try:
        left = usable(gpu_gb) - engine(hf, parallel, replace(serving, tokens=0)).total
    except LayoutError:
        return 0
    return max(0, left) // kv_bytes(hf, parallel, serving.dtype) * parallel.attn_dp


def _working(parallel: EngineParallel, serving: EngineMemory) -> int:
    """Return SGLang 0.5.23's own estimate of prefill activations and decode graphs, which hold a group's requests, padded with groups
    (arg_groups/memory_hook.py)."""
    if not serving.gpu:
        return 0
    graphs = 2 * serving.running // parallel.attn_dp + 3 * serving.running * (parallel.attn_dp > 1)
    return int((512 + 1.5 * max(serving.prefill, 2048) + parallel.world / 8 * 1024 + graphs) * _MB)


def _sizes(layout: RankLayout) -> Iterator[tuple[str, int, str]]:
    """Yield each tensor's name within its layer, its number of elements over all equal layers, and the dtype in which it is sent."""
    for block in layout.blocks:
        yield from ((name, storage.size * len(block.prefixes), storage.dtype) for name, storage in block.storages.items())


def _nbytes(layout: RankLayout) -> int:
    return sum(storage.nbytes * len(block.prefixes) for block in layout.blocks for storage in block.storages.values())
