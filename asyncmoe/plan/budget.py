"""The GPU memory of a configured run, and the line of the run's YAML file that states this memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncmoe.config import Config, sglang_arguments
from asyncmoe.config.transports import TRANSPORTS, resolved
from asyncmoe.errors import ConfigError
from asyncmoe.models import adapter_of, engine_dtype, engine_parallel, kept_routing, load_hf_config, make, trainer_parallel, with_family
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.plan import memory, relief
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import EngineMemory, GpuMemory, Hf, Training
from asyncmoe.plan.phases import Phases, Sides, backup, moved, phases
from asyncmoe.reshard.layout import ITEM_BYTES
from asyncmoe.reshard.nccl import CTA_BYTES
from asyncmoe.rpc import address

HOST = 0.9
"""Planned share of a machine's memory."""
CPU_GB = 2.0
"""Memory of each process of a run without GPUs, in GB."""
OFFLOAD, PLACEMENT = "trainer.memory.optimizer_offload", "placement"
_PREFILL = "--chunked-prefill-size"
_TOKENS, _FRACTION = "--max-total-tokens", "--mem-fraction-static"
_STATIC = ("weights", "adapters", "derived", "KV cache")
"""Parts that SGLang 0.5.23 counts as static: --mem-fraction-static is their share of the free memory when an engine starts
(`_profile_available_bytes` of mem_cache/kv_cache_configurator.py)."""


@dataclass(frozen=True)
class Budget:
    """The memory of a run.

    Attributes:
        trainer: memory of a rank of the largest pipeline stage.
        engine: memory of the largest rank.
        gpu_gb: memory of each GPU, or the limit of each process on a CPU, in GB.
        cpu: the run is for machines without GPUs.
        phases: what a device that both use in turn holds, by phase; empty if they have devices of their own.
        host: bytes of host memory that a trainer rank needs, by the configuration key that requires them.
    """

    trainer: GpuMemory
    engine: GpuMemory
    gpu_gb: float
    cpu: bool = False
    phases: Phases = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The line that states this budget in a YAML file."""
        where = " on CPU" if self.cpu else " in turn" if self.phases else ""
        return f"# memory: trainer {_gb(self.trainer.total)} GB, engine {_gb(self.engine.total)} GB of {self.gpu_gb:g}{where}"

    @property
    def refusals(self) -> tuple[ConfigError, ...]:
        """Errors for GPUs that cannot hold their part of the run, with fixes, for each phase if they are used in turn; empty if all fit."""
        alone = [(None, (self.trainer, relief.NOTHING)), (None, (relief.NOTHING, self.engine))]
        sides: Iterable[tuple[DeviceTurn | None, Sides]] = self.phases.items() or alone
        room = memory.usable(self.gpu_gb)
        return tuple(relief.too_large(*held, self.gpu_gb, turn=turn) for turn, held in sides if sum(one.total for one in held) > room)


def of_run(config: Config, hf: Hf, gpu_gb: float = 80.0, cpu: bool = False) -> Budget:
    """Return the budget of a configuration whose sizes suit the model (`asyncmoe.models.check`).

    Raises:
        ConfigError: the sizes do not suit the model.
        UserError: an engine argument is not a number.
    """
    parallel, settings = trainer_parallel(config), training(config, hf, cpu)
    every = memory.trainer(hf, parallel, settings)
    largest = max(every, key=lambda stage: stage.total)
    keys = (["trainer.async_save"] if config.trainer.async_save else []) + ([] if cpu else [OFFLOAD, "objective.kl.coefficient"])
    needs = {key: nbytes for key in keys if (nbytes := max(stage.host[key] for stage in every))}
    if config.in_turn and not cpu and (kept := max(moved(stage, frozenset(config.trainer.sleep)) for stage in every)):
        needs[PLACEMENT] = kept
    if cpu and needs:
        largest = GpuMemory({**largest.parts, "checkpoint copy": needs["trainer.async_save"]})
    serves = serving(config, hf, cpu, stages(config, hf, gpu_gb, cpu))
    engine = memory.engine(hf, engine_parallel(config), serves)
    if config.in_turn and not cpu and (kept := backup(engine)):
        engine = replace(engine, host={**engine.host, PLACEMENT: kept})
    return Budget(largest, engine, gpu_gb, cpu, by_phase(config, every, engine, cpu), needs)


def by_phase(config: Config, stages: Sequence[GpuMemory], engine: GpuMemory, cpu: bool = False) -> Phases:
    """Return `Budget.phases` of a run."""
    return phases(stages, engine, frozenset(config.trainer.sleep), cpu) if config.in_turn else {}


def check_host(config: Config, found: Budget, ram: int) -> None:
    """Refuse an offload, or devices used in turn, with what exceeds the memory of a trainer's machine, on which the run also starts its
    engines.

    Args:
        ram: bytes of memory of a machine.

    Raises:
        ConfigError: names the share of the optimizer's state that would fit, or what need not sleep.
    """
    share, ranks = config.trainer.memory.optimizer_offload, -(-config.trainer.ranks // config.cluster.trainer_nodes)
    engines = 0 if config.engines.join else config.engines.count * config.engines.ranks_per_node
    needed, room = ranks * sum(found.host.values()) + engines * sum(found.engine.host.values()), int(HOST * ram)
    if not (share or config.in_turn) or needed <= room:
        return
    expected = f"at most {_gb(room)} GB, as {1 - HOST:.0%} of {_gb(ram)} GB are left free"
    if not share:
        got = f"colocated, with which what sleeps takes {_gb(needed)} GB of the machine's memory"
        hint = "leave optimizer out of trainer.sleep, which keeps it on the GPUs, or set placement=split"
        raise ConfigError(PLACEMENT, got=got, expected=expected, hint=hint)
    state = ranks * found.host[OFFLOAD]
    fitting = int(100 * share * max(0, room - (needed - state)) / state) / 100
    raise ConfigError(
        OFFLOAD,
        got=f"{share:g}, with which trainer and engines take {_gb(needed)} GB of the machine's memory",
        expected=expected,
        hint=f"{f'set {fitting:g}, or ' if fitting else ''}use more trainer nodes (cluster.trainer_nodes)",
    )


def least(config: Config, hf: Hf, staged: bool = False, conversations: int = 1) -> tuple[GpuMemory, GpuMemory]:
    """Return the minimum memory of a trainer's GPU and of an engine's GPU. Like `of_run`, but an unconfigured KV cache holds
    `conversations`.

    Args:
        staged: see `EngineMemory`.

    Raises: as `of_run`.
    """
    section = config.engines
    tokens = _tokens(config) or max(min(conversations, section.max_running), section.dp_attention) * conversation(config, hf)
    stages = memory.trainer(hf, trainer_parallel(config), training(config, hf))
    serves = replace(serving(config, hf, staged=staged), tokens=tokens)
    engine = memory.engine(hf, engine_parallel(config), serves)
    return max(stages, key=lambda stage: stage.total), engine


def stages(config: Config, hf: Hf, gpu_gb: float, cpu: bool = False) -> bool:
    """Return whether engines stage a whole version. They do if GPUs have room for a second copy of the weights besides the KV cache
    (`memory.LEAST` conversations if its size is not set). Broadcast weights are written in place.

    Raises: as `of_run`.
    """
    if config.sync.method != "reshard" or config.in_turn:
        return False
    if cpu:
        return True
    return least(config, hf, True, memory.LEAST)[1].fits(gpu_gb)


def engine_arguments(config: Config, hf: Hf, gpu_gb: float) -> tuple[str, ...]:
    """Return the server arguments that bound an engine's memory, to leave room for staged weights and for a trainer that sleeps on the same
    GPU. By default SGLang leaves 10 to 15 GB (`handle_gpu_memory_settings` of arg_groups/memory_hook.py) and assumes that it has the GPU to
    itself. The result is empty if engines neither stage nor take turns, and omits arguments that the user gives.

    The KV cache gets the rest of the GPU. It is bounded in tokens, because the free memory at an engine's start differs: at first the
    trainer has at most a context, at a restart it sleeps. The memory fraction leaves room for these tokens and keeps the rest of the GPU
    free.

    Args:
        gpu_gb: memory of each GPU in GB.

    Raises:
        ConfigError: no room for the configured cache, or for a single conversation.
        UserError: an engine argument is not a number.
    """
    section, staged = config.engines, stages(config, hf, gpu_gb)
    serves = serving(config, hf, staged=staged)
    parallel, given = engine_parallel(config), _tokens(config)
    _, wanted = least(config, hf, staged)
    held = by_phase(config, memory.trainer(hf, trainer_parallel(config), training(config, hf)), wanted)
    asleep = held[DeviceTurn.GENERATING][0] if held else relief.NOTHING
    room = memory.usable(gpu_gb) - asleep.total
    if wanted.total > room:
        raise relief.too_large(asleep, wanted, gpu_gb)
    if not staged and not config.in_turn:
        return ()
    without = memory.engine(hf, parallel, replace(serves, tokens=0))
    tokens = given or (room - without.total) // memory.kv_bytes(hf, parallel, serves.dtype) * parallel.attn_dp
    besides = sum(nbytes for name, nbytes in without.parts.items() if name not in _STATIC)
    fraction = (_FRACTION, f"{int(1000 * (room - besides) / room) / 1000:g}")
    bound = () if given else (_TOKENS, str(tokens // parallel.attn_dp))
    return (*bound, *(() if sglang_arguments.value(section.args, _FRACTION) else fraction))


def is_bounded(config: Config) -> bool:
    """Return whether an engine needs no memory bounds other than the user's (see `engine_arguments`)."""
    given = _tokens(config) is not None and sglang_arguments.value(config.engines.args, _FRACTION) is not None
    return given or config.sync.method != "reshard"


def _tokens(config: Config) -> int | None:
    """Return the configured tokens of the KV cache, if any."""
    given = sglang_arguments.number(config.engines.args, _TOKENS)
    return config.engines.max_total_tokens if given is None else given * config.engines.dp_attention


def hf_of(config: Config, model: Path | None = None) -> Hf:
    """Return the model's Hugging Face configuration, even before the model is made or downloaded.

    Args:
        model: a config.json or its directory, to read instead of `model.path`.

    Raises:
        DataError: there is no such configuration.
        ConfigError: the model would be made where a run must not make one.
    """
    made = config.model.make
    if model is None and made is not None and make.to_make(config.model, config.run.dir):
        return with_family(make.settings(made), config.model.family)
    return with_family(load_hf_config(model or config.model.path), config.model.family)


def for_cpu(config: Config) -> bool:
    """Return whether a run is for CPUs: it uses float32, which engines do not accept on GPUs, or it makes its own model and the dtype is
    auto."""
    dtypes = {config.trainer.weights_dtype, config.engines.dtype}
    return "float32" in dtypes or (config.model.make is not None and "auto" in dtypes)


def training(config: Config, hf: Hf, cpu: bool = False) -> Training:
    """Return the settings for a trainer's memory. A micro-batch is the larger of a full packed one and the longest conversation; a
    context-parallel rank gets its share of that."""
    trainer, objective, saved = config.trainer, config.objective, config.trainer.memory
    dtype = ("float32" if cpu else "bfloat16") if trainer.weights_dtype == "auto" else trainer.weights_dtype
    microbatch = Microbatch(
        rows=-(-max(trainer.tokens_per_microbatch, config.environment.max_tokens or 0) // trainer.cp),
        recompute=trainer.recompute == "full",
        dtype=dtype,
        adapter=adapter_of(config, hf),
        support=(config.rollout.top_k or 0) * config.keeps_sampling_mask + 2 * objective.score_centering,
        cpu=cpu,
        cp=trainer.cp,
        modules=trainer.recompute_modules if trainer.recompute == "selective" else (),
    )
    return Training(
        microbatch,
        trainer.distributed_optimizer,
        reference=objective.kl.coefficient > 0,
        bucket_bytes=config.sync.bucket_bytes,
        communicators=_communicators(config, cpu),
        averages=(ITEM_BYTES[saved.exp_avg_dtype], ITEM_BYTES[saved.exp_avg_sq_dtype]),
        offload=saved.optimizer_offload,
        float8_edges=trainer.edge_layers if trainer.precision == "fp8" else None,
        delta_base=config.sync.delta == "auto" and config.sync.method == "reshard" and adapter_of(config, hf) is None,
    )


def serving(config: Config, hf: Hf, cpu: bool = False, staged: bool = True) -> EngineMemory:
    """Return the settings for an engine's memory. Without `engines.max_total_tokens`, SGLang's KV cache takes all that
    --mem-fraction-static leaves; here the cache is sized for `engines.max_running` of the longest conversations.

    Args:
        staged: see `EngineMemory`.

    Raises:
        UserError: an engine argument is not a number.
    """
    section = config.engines
    return EngineMemory(
        tokens=_tokens(config) or section.max_running * conversation(config, hf),
        staged=staged,
        prefill=sglang_arguments.number(section.args, _PREFILL) or 8192,
        running=section.max_running,
        dtype=engine_dtype(hf, section),
        adapter=adapter_of(config, hf),
        bucket_bytes=config.sync.bucket_bytes,
        gpu=not cpu,
        communicators=_communicators(config, cpu),
        routes=kept_routing(config, hf) is not None,
    )


def _communicators(config: Config, cpu: bool) -> int:
    """Return the bytes of the NCCL communicator over which a rank exchanges weights."""
    sync = config.sync
    over_nccl = TRANSPORTS[resolved(sync.transport, True, not address.several(config.cluster.network), config.in_turn)].nccl
    if cpu or sync.method != "reshard" or not over_nccl:
        return 0
    return sync.nccl_max_ctas * CTA_BYTES


def conversation(config: Config, hf: Hf) -> int:
    """Return the tokens of the longest conversation (`asyncmoe.rollout.episodes.environments.bounds`)."""
    limits = (config.environment.max_tokens, hf.get("max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=config.trainer.tokens_per_microbatch)


def _gb(nbytes: int) -> str:
    """Format bytes as GB with three significant digits."""
    return f"{nbytes / 1e9:.3g}"
