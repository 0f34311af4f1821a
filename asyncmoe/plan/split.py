"""`asyncmoe plan --nodes`: how the nodes of a cluster could be split between a trainer and its engines.

The rule, which looks at memory and not at speed:

1. The trainer gets as few nodes as its memory asks for, because generation is the larger share of the work; further suggestions give it
   two and four times as many, as long as the engines have as many nodes or more. `asyncmoe simulate --sweep` says what is fastest.
2. On so many nodes, of the trainer's sizes that fit: tensor parallelism within a node; expert parallelism within a node, if that fits;
   the fewest pipeline stages; without recomputation, if that fits; then the least tensor parallelism. Stages are equal but for the first
   and the last, which share what is left over. The optimizer's state is shared out over data-parallel ranks.
3. Engines get all other nodes. Of their sizes, each within a node, those that stage new weights while they generate come first, then
   those with the largest prefills, then those whose KV cache holds most tokens for each GPU. One that has no room for `LEAST`
   conversations is not taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from asyncmoe.config.training import SyncSection
from asyncmoe.errors import ConfigError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.lora import halves
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.shape import Shape
from asyncmoe.plan import memory
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import EngineMemory, GpuMemory, RankParameters, Training
from asyncmoe.reshard import nccl_room
from asyncmoe.reshard.layout import ITEM_BYTES

LEAST = 8
"""Conversations an engine's KV cache has room for, at least."""
_PREFILLS = (8192, 4096, 2048)
_TIMES = (1, 2, 4)
_MOST_NODES = 1 << 10
_MAX_CTAS = SyncSection().nccl_max_ctas


@dataclass(frozen=True)
class Cluster:
    """What there is, and what is to run on it.

    Attributes:
        context: tokens of the longest conversation, and of a micro-batch.
        adapter: what is trained in place of the weights.
        bucket_bytes: `sync.bucket_bytes`.
    """

    nodes: int
    gpus: int = 8
    gpu_gb: float = 80.0
    context: int = 8192
    adapter: Kind | None = None
    dtype: str = "bfloat16"
    bucket_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        least = {"--nodes": (self.nodes, 2), "--gpus-per-node": (self.gpus, 1), "--context": (self.context, 1)}
        for name, (got, wanted) in least.items():
            if got < wanted:
                raise ConfigError(name, got=got, expected=f"at least {wanted}")
        if self.nodes > _MOST_NODES:
            raise ConfigError("--nodes", got=self.nodes, expected=f"at most {_MOST_NODES}")
        if not self.gpu_gb > 0:
            raise ConfigError("--gpu-gb", got=self.gpu_gb, expected="a positive number of GB")


@dataclass(frozen=True)
class TrainerSizes:
    """Sizes of a trainer that fit.

    Attributes:
        rows: of a micro-batch.
        memory: of a rank of the stage that holds most.
    """

    parallel: MegatronParallel
    rows: int
    recompute: bool
    memory: GpuMemory


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine that fit.

    Attributes:
        serving: its settings; all that is left of a GPU is KV cache.
        memory: of the rank that holds most.
    """

    parallel: EngineParallel
    serving: EngineMemory
    memory: GpuMemory


@dataclass(frozen=True)
class Split:
    """A way to divide the nodes.

    Attributes:
        engines: how many of `engine`.
    """

    trainer_nodes: int
    engine_nodes: int
    trainer: TrainerSizes
    engine: EngineSizes
    engines: int

    def conversations(self, context: int) -> int:
        """Of so many tokens that all engines have room for at once."""
        return self.engines * (self.engine.serving.tokens // context)


def suggest(hf: Mapping[str, Any], cluster: Cluster) -> tuple[Split, ...]:
    """Splits by the rule above, the first one first.

    Raises:
        ConfigError: nothing fits; says how many nodes would do, if some would.
        UserError: a model family that is not supported.
    """
    if cluster.adapter is not None:
        halves.check(cluster.adapter, family_of(hf).shape_of(hf))
    engine = best_engine(hf, cluster)
    per_node = cluster.gpus // engine.parallel.world
    first = _fewest_nodes(hf, cluster, cluster.nodes - 1, per_node)
    if first is None:
        enough = _fewest_nodes(hf, cluster, _MOST_NODES - 1, per_node)
        others = " or train adapters (--lora)" if cluster.adapter is None else " or lower --context"
        cure = None if enough is None else f"take at least {enough + 1} nodes,{others}"
        expected = f"so many that a trainer fits on all but one of them, with {cluster.gpus} GPUs of {cluster.gpu_gb:g} GB each"
        raise ConfigError("--nodes", got=cluster.nodes, expected=expected, cure=cure)
    found = []
    for nodes in sorted({first * times for times in _TIMES}):
        rest = cluster.nodes - nodes
        chosen = best_trainer(hf, cluster, nodes, rest * per_node) if nodes == first or nodes <= rest else None
        if chosen is not None:
            found.append(Split(nodes, rest, chosen, engine, rest * per_node))
    return tuple(found)


def _fewest_nodes(hf: Mapping[str, Any], cluster: Cluster, most: int, per_node: int) -> int | None:
    """Nodes that the trainer needs, beside so many engines on each of the others, at least one of which there is."""
    least = _least(memory.whole(hf), MegatronParallel(), cluster)
    node = memory.usable(cluster.gpu_gb) * cluster.gpus
    sizes = range(max(1, -(-least // node)), most + 1)
    return next((n for n in sizes if best_trainer(hf, cluster, n, max(1, cluster.nodes - n) * per_node) is not None), None)


def best_trainer(hf: Mapping[str, Any], cluster: Cluster, nodes: int, engines: int = 1) -> TrainerSizes | None:
    """The sizes that come first by the rule and fit, if any do.

    Args:
        engines: that a rank exchanges weights with.
    """
    m, whole, room = family_of(hf).shape_of(hf), memory.whole(hf), memory.usable(cluster.gpu_gb)
    choices = product((p for p in _sizes(m, cluster, nodes) if _least(whole, p, cluster) <= room), (False, True))
    for parallel, recompute in sorted(choices, key=lambda choice: _preference(choice[0], choice[1], cluster)):
        stages = memory.trainer(hf, parallel, _training(cluster, recompute, engines))
        most = max(stages, key=lambda stage: stage.total)
        if most.fits(cluster.gpu_gb):
            return TrainerSizes(parallel, cluster.context, recompute, most)
    return None


def _training(cluster: Cluster, recompute: bool, engines: int = 1) -> Training:
    microbatch = Microbatch(cluster.context, recompute, cluster.dtype, cluster.adapter)
    return Training(microbatch, bucket_bytes=cluster.bucket_bytes, communicators=nccl_room.nbytes(_MAX_CTAS, engines))


def _least(whole: RankParameters, parallel: MegatronParallel, cluster: Cluster) -> int:
    """Bytes that some rank holds at least: the mean of all, were nothing copied to several tensor-parallel ranks."""
    stage = RankParameters(whole.dense // (parallel.tp * parallel.pp), whole.experts // (parallel.pp * parallel.ep * parallel.etp))
    weights = stage.all * ITEM_BYTES[cluster.dtype]
    if cluster.adapter is not None:
        return weights
    return weights + stage.all * memory.GRADIENT + memory.optimizer_bytes(stage, parallel, _training(cluster, recompute=True))


def _preference(parallel: MegatronParallel, recompute: bool, cluster: Cluster) -> tuple[int, ...]:
    return parallel.ep > cluster.gpus, parallel.pp, recompute, parallel.tp, parallel.ep


def _sizes(m: Shape, cluster: Cluster, nodes: int) -> Iterator[MegatronParallel]:
    """All that divide the model and the GPUs."""
    gpus = nodes * cluster.gpus
    for tp, pp in product(_divisors(cluster.gpus), _divisors(gpus)):
        if (
            gpus % (tp * pp)
            or any(total % tp for total in (m.heads, m.kv_heads, m.vocab, m.shared_width))
            or (m.dense_layers and m.dense_width % tp)
        ):
            continue
        stages = _stages(m.layers, pp)
        dp = gpus // (tp * pp)
        for ep in _divisors(tp * dp) if m.experts else (1,):
            # megatron-core 0.16 divides experts over tensor-parallel ranks where they are not divided over others
            etp = 1 if ep > 1 else tp
            if stages is not None and (not m.experts or (m.experts % ep == 0 and m.expert_width % etp == 0)):
                yield MegatronParallel(tp, pp, ep, etp, dp, first_layers=stages[0], last_layers=stages[1])


def _stages(layers: int, pp: int) -> tuple[int | None, int | None] | None:
    """Layers of the first and of the last stage, where they are not an equal share; None: a stage would have none."""
    if layers % pp == 0:
        return None, None
    between = -(-layers // pp)
    rest = layers - (pp - 2) * between
    return (rest // 2, rest - rest // 2) if pp > 1 and rest > 1 else None


def best_engine(hf: Mapping[str, Any], cluster: Cluster) -> EngineSizes:
    """The sizes that come first by the rule.

    Raises:
        ConfigError: a node has no room for an engine.
    """
    m = family_of(hf).shape_of(hf)
    for staging, prefill in product((True, False), _PREFILLS):
        # Of one engine; with more than 16 of them each communicator takes less.
        serving = EngineMemory(
            0,
            staging,
            prefill,
            dtype=cluster.dtype,
            adapter=cluster.adapter,
            bucket_bytes=cluster.bucket_bytes,
            communicators=nccl_room.nbytes(_MAX_CTAS, 1),
        )
        rooms = {parallel: memory.kv_room(hf, parallel, serving, cluster.gpu_gb) for parallel in _engines(m, cluster.gpus)}
        able = [parallel for parallel, room in rooms.items() if room >= LEAST * cluster.context]
        if able:
            chosen = max(able, key=lambda parallel: (rooms[parallel] / parallel.world, -parallel.world))
            full = replace(serving, tokens=rooms[chosen])
            return EngineSizes(chosen, full, memory.engine(hf, chosen, full))
    raise ConfigError(
        "--gpus-per-node and --gpu-gb",
        got=f"{cluster.gpus} GPUs of {cluster.gpu_gb:g} GB",
        expected=f"room for an engine with {LEAST} conversations of {cluster.context} tokens within a node",
        cure="lower --context, or take nodes with more memory (an engine over several nodes is not supported)",
    )


def _engines(m: Shape, gpus: int) -> Iterator[EngineParallel]:
    """Sizes within a node, whole experts on each rank where they can be divided so."""
    for tp in _divisors(gpus):
        ep = tp if m.experts and m.experts % tp == 0 else 1
        width = m.expert_width if m.experts else m.dense_width
        if m.shared_width % tp or (m.dense_layers and m.dense_width % tp):
            continue
        if m.heads % tp == 0 and (m.kv_heads % tp == 0 or tp % m.kv_heads == 0) and width % (tp // ep) == 0:
            yield EngineParallel(tp, ep)


def _divisors(total: int) -> list[int]:
    return [size for size in range(1, total + 1) if total % size == 0]
