"""`asyncmoe plan --nodes`: suggest how to split the nodes of a cluster between a trainer and its engines.

1. An engine is within a node if it fits there, else over the fewest nodes (2, 4, ...) on which it fits. Of its sizes, those that stage new
   weights during generation are preferred, then the largest prefills, then the most tokens of KV cache per GPU. Sizes without room for
   `memory.LEAST` conversations are excluded. An engine runs as many conversations of half the context as fit into its cache, at most 256.
2. On given nodes the trainer gets the sizes that fit and are preferred by these criteria, each of which only breaks ties of those before
   it: less of the optimizer's state in host memory (in quarters); fewer context-parallel ranks; expert parallelism within a node; fewer
   pipeline stages; no recomputation; less tensor parallelism; less expert parallelism. Tensor parallelism is always within a node, and a
   context-parallel rank has at least `_LEAST_ROWS` rows of a context. Pipeline stages are equal, except that the first and last share the
   remainder. The optimizer's state is sharded over data-parallel ranks.
3. The smallest split gives the trainer the fewest nodes on which such sizes fit. The balanced split gives it the multiple of this number
   with which the slower side is fastest (`asyncmoe.plan.speeds`). Any multiple fits: more data-parallel ranks never need more memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil

from asyncmoe.config.sync import SyncSection
from asyncmoe.errors import ConfigError, LayoutError
from asyncmoe.models import EngineParallel, MegatronParallel, checks, shape_of
from asyncmoe.models.latent import Latent
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.quantised import float8_of
from asyncmoe.models.shape import Shape
from asyncmoe.plan import activations, memory, speeds
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import EngineMemory, GpuMemory, Hf, RankParameters, Training
from asyncmoe.plan.speeds import Measured
from asyncmoe.reshard.nccl import CTA_BYTES

_PREFILLS = (8192, 4096, 2048)
_LEAST_ROWS = 8192
"""Minimum rows of a context on a context-parallel rank: with fewer, transfer of keys and values takes longer than attention."""
_MOST_NODES = 1 << 10
_COMMUNICATOR = SyncSection().nccl_max_ctas * CTA_BYTES


@dataclass(frozen=True)
class Cluster:
    """A cluster and the run planned for it.

    Attributes:
        gpus: GPUs per node.
        gpu_gb: memory of a GPU in GB (1e9 bytes).
        context: tokens of the longest conversation and of a micro-batch.
        adapter: the adapter that is trained in place of the weights, if any.
        machine: it is one machine, whose GPUs are divided as nodes, or used in turn; weights move without NCCL.
        in_turn: trainer and engines use the same GPUs in turn, so weights are written in place.
    """

    nodes: int
    gpus: int = 8
    gpu_gb: float = 80.0
    context: int = 8192
    adapter: Kind | None = None
    machine: bool = False
    in_turn: bool = False


@dataclass(frozen=True)
class TrainerSizes:
    """Trainer sizes that fit.

    Attributes:
        memory: memory of a rank of the largest pipeline stage.
        cp: context-parallel ranks, which `parallel` counts as data-parallel.
        offload: share of the optimizer's state in host memory.
    """

    parallel: MegatronParallel
    recompute: bool
    memory: GpuMemory
    cp: int = 1
    offload: float = 0.0


@dataclass(frozen=True)
class EngineSizes:
    """Engine sizes that fit.

    Attributes:
        serving: the engine's settings; the KV cache takes the rest of the GPU.
        memory: memory of the largest rank.
        nodes: machines over which an engine is spread.
    """

    parallel: EngineParallel
    serving: EngineMemory
    memory: GpuMemory
    nodes: int = 1

    def count(self, nodes: int, gpus: int) -> int:
        """Return how many engines fit on `nodes` nodes with `gpus` GPUs each."""
        return nodes // self.nodes * (self.nodes * gpus // self.parallel.world)


@dataclass(frozen=True)
class Split:
    """A division of the nodes.

    Attributes:
        name: what the split is best at.
        cluster: what is divided; for one machine, its GPUs as nodes.
        engines: number of engines.
        least_nodes: fewest nodes on which a trainer of these sizes fits; each multiple of this number fits, too.
        trained, sampled: sampled tokens per second that the trainer can train and all engines can generate.
    """

    name: str
    cluster: Cluster
    trainer_nodes: int
    engine_nodes: int
    trainer: TrainerSizes
    engine: EngineSizes
    engines: int
    least_nodes: int
    trained: float
    sampled: float

    def conversations(self, context: int) -> int:
        """Return how many conversations of `context` tokens fit into all engines at once."""
        groups = self.engine.parallel.attn_dp
        return self.engines * groups * (self.engine.serving.tokens // groups // context)


def suggest(hf: Hf, cluster: Cluster, measured: Measured | None = None) -> tuple[Split, ...]:
    """Return the balanced split, the smallest if it differs, and, if both keep optimizer state in host memory, the smallest split without
    that.

    Args:
        measured: speeds to balance by; None: estimates.

    Raises:
        ConfigError: nothing fits; the message gives a sufficient number of nodes if there is one.
        UserError: unsupported model family.
    """
    engine = best_engine(hf, cluster)
    most = cluster.nodes - engine.nodes
    first = _fewest_nodes(hf, cluster, most)
    if first is None:
        enough = _fewest_nodes(hf, cluster, _MOST_NODES - engine.nodes)
        others = " or train adapters (--lora)" if cluster.adapter is None else " or lower --context"
        hint = None if enough is None else f"take at least {enough + engine.nodes} nodes,{others}"
        but = "one" if engine.nodes == 1 else f"{engine.nodes}, which an engine takes,"
        expected = f"enough nodes for a trainer on all but {but} of them, with {cluster.gpus} GPUs of {cluster.gpu_gb:g} GB each"
        raise ConfigError("--nodes", got=cluster.nodes, expected=expected, hint=hint)

    @cache
    def split(nodes: int, name: str = "balanced", least: int = first) -> Split:
        chosen = best_trainer(hf, cluster, nodes)
        assert chosen is not None, "more nodes than enough are not enough"
        rest = (cluster.nodes - nodes) // engine.nodes * engine.nodes
        return made(hf, cluster, (chosen, engine), name, (nodes, rest, least), measured)

    sizes = range(first, most + 1, first)
    turn = bisect_left(sizes, True, key=lambda nodes: split(nodes).trained >= split(nodes).sampled)
    balanced = max(map(split, sizes[max(0, turn - 1) : turn + 1]), key=lambda one: min(one.trained, one.sampled))
    found = [split(first, "smallest and balanced")] if balanced.trainer_nodes == first else [balanced, split(first, "smallest")]
    if all(one.trainer.offload for one in found) and (plain := _fewest_nodes(hf, cluster, most, offload=0)):
        found.append(split(plain, "without offload", plain))
    return tuple(found)


def made(
    hf: Hf, cluster: Cluster, sizes: tuple[TrainerSizes, EngineSizes], name: str, nodes: tuple[int, int, int], measured: Measured | None
) -> Split:
    """Return a split of these sizes, with its speeds. `nodes`: of the trainer, of engines, and the fewest of such a trainer."""
    trainer, engine = sizes
    count, flops = engine.count(nodes[1], cluster.gpus), 6 + 2 * trainer.recompute - 2 * (cluster.adapter is not None)
    trained = speeds.of_trainer(hf, trainer.parallel.world, flops, measured)
    sampled = count * speeds.of_engine(hf, engine.parallel, engine.serving, cluster.context, measured)
    return Split(name, cluster, *nodes[:2], trainer, engine, count, nodes[2], trained, sampled)


def _fewest_nodes(hf: Hf, cluster: Cluster, most: int, offload: float = 1) -> int | None:
    """Return the fewest nodes, up to `most`, on which the trainer fits with at most this share of the optimizer's state in host memory, or
    None."""
    least = _least(memory.whole(hf), MegatronParallel(), cluster) * (1 if offload or cluster.adapter is not None else 3)  # 18 bytes, not 6
    node = memory.usable(cluster.gpu_gb) * cluster.gpus
    sizes = ((n, best_trainer(hf, cluster, n)) for n in range(max(1, -(-least // node)), most + 1))
    return next((n for n, trainer in sizes if trainer is not None and trainer.offload <= offload), None)


def best_trainer(hf: Hf, cluster: Cluster, nodes: int) -> TrainerSizes | None:
    """Return the first sizes that fit, in the order of rule 2 above, if any."""
    m, whole, room = shape_of(hf), memory.whole(hf), memory.usable(cluster.gpu_gb)
    sizes = [p for p in _sizes(m, cluster, nodes) if _least(whole, p, cluster) <= room]
    ranks = {p: [cp for cp in checks.divisors(p.dp) if cp == 1 or cluster.context >= cp * _LEAST_ROWS] for p in sizes}
    every = ((p, recompute, cp) for p, recompute in product(sizes, (False, True)) for cp in ranks[p])
    choices = sorted(every, key=lambda one: (one[2], one[0].ep > cluster.gpus, one[0].pp, one[1], one[0].tp, one[0].ep))
    found: TrainerSizes | None = None
    for parallel, recompute, cp in choices:
        microbatch = Microbatch(-(-cluster.context // cp), recompute, adapter=cluster.adapter, cp=cp)
        if activations.kept(m, parallel, 0, microbatch) > room:
            continue
        training = Training(microbatch, communicators=0 if cluster.machine else _COMMUNICATOR)
        try:
            share = max(_offload(stage, room) for stage in memory.trainer(hf, parallel, training))
        except LayoutError:  # these sizes split float8 blocks
            continue
        if share <= 1 and (found is None or share < found.offload):
            stages = memory.trainer(hf, parallel, replace(training, offload=share))
            largest = max(stages, key=lambda stage: stage.total)
            host = {key: max(stage.host[key] for stage in stages) for key in largest.host}  # another stage may have the most
            found = TrainerSizes(parallel, recompute, replace(largest, host=host), cp, share)
        if share == 0:
            break
    return found


def _offload(stage: GpuMemory, room: int) -> float:
    """Return the smallest share of the optimizer's state, in quarters, that a stage must offload to fit with its margin; above 1 if it
    cannot fit."""
    excess = stage.total + stage.margin - room
    return 0.0 if excess <= 0 else ceil(4 * excess / stage.parts["optimizer"]) / 4


def _least(whole: RankParameters, parallel: MegatronParallel, cluster: Cluster) -> int:
    """Return a lower bound for the bytes of the largest rank: the mean of all ranks if tensor-parallel ranks replicated nothing, with the
    optimizer's state in host memory."""
    stage = whole.dense // (parallel.tp * parallel.pp) + whole.experts // (parallel.pp * parallel.ep * parallel.etp)
    return stage * (2 if cluster.adapter is not None else 2 + memory.GRADIENT)  # bytes of bfloat16, and of gradients


def _sizes(m: Shape, cluster: Cluster, nodes: int) -> Iterator[MegatronParallel]:
    """Yield all sizes that divide the model and the GPUs."""
    gpus = nodes * cluster.gpus
    for tp, pp in product(checks.divisors(cluster.gpus), checks.divisors(gpus)):
        stages = _stages(m.layers, pp)
        if gpus % (tp * pp) or stages is None:
            continue
        dp = gpus // (tp * pp)
        for ep in checks.divisors(tp * dp) if m.experts else (1,):
            # megatron-core 0.16 shards experts over tensor-parallel ranks if there is no expert parallelism.
            sizes = MegatronParallel(tp, pp, ep, 1 if ep > 1 else tp, dp, first_layers=stages[0], last_layers=stages[1])
            with suppress(ConfigError):
                checks.check_trainer("", m, sizes)
                yield sizes


def _stages(layers: int, pp: int) -> tuple[int | None, int | None] | None:
    """Return the layers of the first and last stage, each None for an equal share; None if a stage would have no layers."""
    if layers % pp == 0:
        return None, None
    between = -(-layers // pp)
    rest = layers - (pp - 2) * between
    return (rest // 2, rest - rest // 2) if pp > 1 and rest > 1 else None


def best_engine(hf: Hf, cluster: Cluster) -> EngineSizes:
    """Return the first sizes that fit, in the order of rule 1 above.

    Raises:
        ConfigError: no engine fits on any number of nodes that leaves one to the trainer.
    """
    nodes = 1
    while nodes < (cluster.nodes if cluster.adapter is None else 2):  # engines with adapters are within a node
        if (found := engine_over(hf, cluster, nodes)) is not None:
            return found
        nodes *= 2
    raise ConfigError(
        "--gpus-per-node and --gpu-gb",
        got=f"{cluster.gpus} GPUs of {cluster.gpu_gb:g} GB",
        expected=f"room for an engine with {memory.LEAST} conversations of {cluster.context} tokens "
        f"on {nodes // 2} of {cluster.nodes} nodes",
        hint=f"lower --context, or take {'more nodes, or ' if cluster.adapter is None else ''}nodes with more memory"
        + ("; float8 shards must be whole blocks of 128, which limits TP" if float8_of(hf) else ""),
    )


def engine_over(hf: Hf, cluster: Cluster, nodes: int) -> EngineSizes | None:
    """Return the first sizes, in the order of rule 1, of an engine over `nodes` nodes, or None."""
    m, nccl = shape_of(hf), 0 if cluster.machine else _COMMUNICATOR
    for staged, prefill in product((False,) if cluster.in_turn else (True, False), _PREFILLS):
        serving = EngineMemory(0, staged, prefill, adapter=cluster.adapter, communicators=nccl, routes=m.experts > 0)
        replicated = isinstance(m.attention, Latent) and cluster.adapter is None
        sizes = (parallel for parallel in _engines(m, cluster.gpus * nodes, replicated) if parallel.tp % nodes == 0)
        rooms = {parallel: memory.kv_room(hf, parallel, serving, cluster.gpu_gb) for parallel in sizes}
        able = [parallel for parallel, room in rooms.items() if room >= max(memory.LEAST, parallel.attn_dp) * cluster.context]
        if able:
            chosen = max(able, key=lambda parallel: (rooms[parallel] / parallel.world, -parallel.world))
            running = min(serving.running, 2 * rooms[chosen] // cluster.context) // chosen.attn_dp * chosen.attn_dp
            full = replace(serving, tokens=rooms[chosen], running=running)
            return EngineSizes(chosen, full, memory.engine(hf, chosen, full), nodes)
    return None


def _engines(m: Shape, gpus: int, replicated: bool) -> Iterator[EngineParallel]:
    """Yield sizes on `gpus` GPUs, with whole experts on each rank if the rank count divides them.

    Args:
        replicated: attention may be data-parallel.
    """
    for tp in checks.divisors(gpus):
        for attn_dp in checks.divisors(tp) if replicated else (1,):
            sizes = EngineParallel(tp, tp if m.experts and m.experts % tp == 0 else 1, attn_dp)
            with suppress(ConfigError):
                checks.check_engine("", m, sizes, dp_attention=True)
                yield sizes
