"""The memory a configured run asks of its GPUs, and the line in which its YAML says so."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.models import EngineParallel, adapter_of, engine_dtype, load_hf_config, make, trainer_parallel
from asyncmoe.plan import memory, relief
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import EngineMemory, GpuMemory, Training
from asyncmoe.reshard import nccl_room

CPU_GB = 2.0
"""What each process of a run without GPUs is given."""
_PREFILL = "--chunked-prefill-size"
_TOKENS, _FRACTION = "--max-total-tokens", "--mem-fraction-static"
_STATIC = ("weights", "adapters", "derived", "KV cache")
"""What SGLang 0.5.23 counts as static: --mem-fraction-static is its share of the memory that is free when an engine starts
(`_profile_available_bytes` of mem_cache/kv_cache_configurator.py)."""
_LINE = re.compile(r"^# memory: trainer \S+ GB, engine \S+ GB of (\d+(?:\.\d+)?)( on CPU| together)?$", re.MULTILINE)


@dataclass(frozen=True)
class Budget:
    """What a run asks for.

    Attributes:
        trainer: of a rank of the pipeline stage that holds most.
        engine: of the rank that holds most.
        gpu_gb: memory of each GPU, or what each process may take on a CPU.
        cpu: the run is for machines without GPUs.
        shared: a trainer's rank and an engine are on the same GPU.
    """

    trainer: GpuMemory
    engine: GpuMemory
    gpu_gb: float
    cpu: bool = False
    shared: bool = False

    @property
    def line(self) -> str:
        """What a YAML says of itself."""
        where = " on CPU" if self.cpu else " together" if self.shared else ""
        return f"# memory: trainer {_gb(self.trainer.total)} GB, engine {_gb(self.engine.total)} GB of {self.gpu_gb:g}{where}"

    @property
    def sums(self) -> tuple[str, str]:
        """How that comes about, as a YAML says it."""
        return _sum("the trainer", self.trainer), _sum("an engine", self.engine)

    @property
    def fits(self) -> bool:
        if self.shared:
            return self.trainer.total + self.engine.total <= memory.usable(self.gpu_gb)
        return self.trainer.fits(self.gpu_gb) and self.engine.fits(self.gpu_gb)


def of_run(config: Config, hf: Mapping[str, Any], gpu_gb: float = 80.0, cpu: bool = False) -> Budget:
    """The budget of a configuration whose sizes suit the model (`asyncmoe.models.check`).

    Raises:
        ConfigError: they do not.
        UserError: an argument for engines that is no number.
    """
    stages = memory.trainer(hf, trainer_parallel(config), training(config, hf, cpu))
    engine = memory.engine(hf, EngineParallel(config.engines.tp, config.engines.ep), serving(config, hf, cpu))
    return Budget(max(stages, key=lambda stage: stage.total), engine, gpu_gb, cpu, config.engines.share_gpus and not cpu)


def least(config: Config, hf: Mapping[str, Any]) -> tuple[GpuMemory, GpuMemory]:
    """What a trainer's GPU and an engine's must have room for: as `of_run`, with a KV cache of one conversation unless one is configured.

    Raises: as `of_run`.
    """
    section = config.engines
    tokens = _tokens(config) or _conversation(config, hf)
    stages = memory.trainer(hf, trainer_parallel(config), training(config, hf))
    engine = memory.engine(hf, EngineParallel(section.tp, section.ep), replace(serving(config, hf), tokens=tokens))
    return max(stages, key=lambda stage: stage.total), engine


def engine_arguments(config: Config, hf: Mapping[str, Any], gpu_gb: float) -> tuple[str, ...]:
    """What bounds an engine's memory so that what comes besides finds room: the memory that versions are received into, and a trainer on
    the same GPU. SGLang by itself leaves 10 to 15 GB (`handle_gpu_memory_settings` of arg_groups/memory_hook.py), and counts on having a
    GPU alone. Empty where there is neither; what the user gives is not given again.

    The KV cache gets what is left of a GPU; of a shared one no more than `engines.max_running` conversations can fill. It is bounded in
    tokens, because the memory that is free when an engine starts depends on how far a trainer beside it has come; the fraction leaves
    that bound room, and the rest of the GPU free.

    Args:
        gpu_gb: of each GPU.

    Raises:
        ConfigError: no room for the cache that is configured, or for a single conversation.
        UserError: an argument for engines that is no number.
    """
    section, serves = config.engines, serving(config, hf)
    if not (serves.staging or section.share_gpus):
        return ()
    parallel, given = EngineParallel(section.tp, section.ep), _tokens(config)
    trainer, wanted = least(config, hf)
    room = memory.usable(gpu_gb) - (trainer.total if section.share_gpus else 0)
    if wanted.total > room:
        raise too_large(config, trainer, wanted, gpu_gb)
    without = memory.engine(hf, parallel, replace(serves, tokens=0))
    tokens = given or (room - without.total) // memory.kv_bytes(hf, parallel, serves.dtype)
    if section.share_gpus and not given:
        tokens = min(tokens, serves.tokens)
    besides = sum(nbytes for name, nbytes in without.parts.items() if name not in _STATIC)
    fraction = (_FRACTION, f"{int(1000 * (room - besides) / room) / 1000:g}")
    return (*(() if given else (_TOKENS, str(tokens))), *(() if _is_given(section.args, _FRACTION) else fraction))


def is_bounded(config: Config) -> bool:
    """Whether an engine needs no bounds of its memory besides those that the user gives (see `engine_arguments`)."""
    staging = config.sync.staging and config.sync.method == "reshard"
    given = _tokens(config) is not None and _is_given(config.engines.args, _FRACTION)
    return given or not (staging or config.engines.share_gpus)


def too_large(config: Config, trainer: GpuMemory, engine: GpuMemory, gpu_gb: float) -> ConfigError:
    """The refusal of what does not fit on a GPU: of the trainer, of an engine, or of both where they share it."""
    staging = ["sync.staging=false"] if "staging" in engine.parts else []
    usable = f"at most {_gb(memory.usable(gpu_gb))}, as {1 - memory.USABLE:.0%} of {gpu_gb:.3g} GB are left free"
    fewer = "fewer tokens (trainer.tokens_per_microbatch, engines.max_total_tokens, rollout.max_new_tokens)"
    if config.engines.share_gpus:
        got = f"{_gb(trainer.total + engine.total)} GB = {_gb(trainer.total)} of the trainer + {_gb(engine.total)} of an engine"
        dominating = (*relief.of_trainer(trainer.parts, engine.total), *relief.of_engine(engine.parts, trainer.total))
        ways = relief.joined(dominating, (*staging, "engines.share_gpus=false on more GPUs", fewer))
        return ConfigError("memory of a GPU", got=got, expected=usable, cure=f"take {', or '.join(ways)}")
    usual = (*staging, "a larger engines.tp on more GPUs", "fewer tokens (engines.max_total_tokens, environment.max_tokens)")
    ways = relief.joined(relief.of_engine(engine.parts), usual)
    got = f"{_gb(engine.total)} GB ({_largest(engine)})"
    return ConfigError("memory of an engine's GPU", got=got, expected=usable, cure=f"take {', or '.join(ways)}")


def _largest(held: GpuMemory) -> str:
    parts = sorted(held.parts.items(), key=lambda part: -part[1])[:3]
    return " + ".join(f"{name} {_gb(nbytes)}" for name, nbytes in parts) + (" + ..." if len(held.parts) > len(parts) else "")


def _tokens(config: Config) -> int | None:
    """Tokens of the KV cache, where they are configured."""
    args = config.engines.args
    return _number(args, _TOKENS, 0) if _is_given(args, _TOKENS) else config.engines.max_total_tokens


def hf_of(config: Config, model: Path | None = None) -> Mapping[str, Any]:
    """The model's configuration, also where it has not been made or fetched yet.

    Args:
        model: a directory with a config.json, or such a file, to look into instead of `model.path`.

    Raises:
        DataError: none is there.
    """
    if model is None and config.model.make is not None:
        return make.settings(config.model.make)
    return load_hf_config(model or config.model.path)


def for_cpu(config: Config) -> bool:
    """A run that is not for GPUs: in float32, which engines do not take there, or of a tiny model whose dtype is left open."""
    dtypes = {config.trainer.dtype, config.engines.dtype}
    return "float32" in dtypes or (config.model.make is not None and "auto" in dtypes)


def training(config: Config, hf: Mapping[str, Any], cpu: bool = False) -> Training:
    """What of a configuration decides. A micro-batch is as large as a packed one may be, or as the longest conversation."""
    trainer, objective = config.trainer, config.objective
    dtype = ("float32" if cpu else "bfloat16") if trainer.dtype == "auto" else trainer.dtype
    microbatch = Microbatch(
        rows=max(trainer.tokens_per_microbatch, config.environment.max_tokens or 0),
        recompute=trainer.recompute == "full",
        dtype=dtype,
        adapter=adapter_of(config, hf),
        unmasked=objective.kl.coefficient > 0 and config.keeps_sampling_mask,
    )
    distributed, reference = trainer.distributed_optimizer, objective.kl.coefficient > 0
    return Training(microbatch, distributed, reference, config.sync.bucket_bytes, _communicators(config, cpu, config.engines.count))


def serving(config: Config, hf: Mapping[str, Any], cpu: bool = False) -> EngineMemory:
    """The same of engines. Where `engines.max_total_tokens` is not given SGLang takes whatever --mem-fraction-static leaves it: here it is
    given what `engines.max_running` conversations can need.

    Raises:
        UserError: an argument for engines that is no number.
    """
    section = config.engines
    return EngineMemory(
        tokens=_tokens(config) or section.max_running * _conversation(config, hf),
        staging=config.sync.staging and config.sync.method == "reshard",
        prefill=_number(section.args, _PREFILL, 8192),
        running=section.max_running,
        dtype=engine_dtype(hf, section),
        adapter=adapter_of(config, hf),
        bucket_bytes=config.sync.bucket_bytes,
        gpu=not cpu,
        communicators=_communicators(config, cpu, 1),
    )


def _communicators(config: Config, cpu: bool, mine: int) -> int:
    """Bytes of a rank that has so many of NCCL's, one for each engine it exchanges weights with."""
    sync = config.sync
    over_nccl = sync.transport == "nccl" or (sync.transport == "auto" and not config.engines.share_gpus)
    if cpu or sync.method != "reshard" or not over_nccl:
        return 0
    return nccl_room.nbytes(sync.nccl_max_ctas, config.engines.count, mine)


def stated(text: str, source: str) -> tuple[float, bool]:
    """Of the line of a YAML: the memory of a GPU, and whether it is for CPUs.

    Raises:
        ConfigError: there is none, or more than one.
    """
    found = _LINE.findall(text)
    if len(found) != 1:
        raise ConfigError(
            f"{source}: memory",
            got=f"{len(found)} lines `# memory: ...`",
            expected="one like `# memory: trainer 72.8 GB, engine 70 GB of 80`, or `... of 2 on CPU`",
            cure=f"asyncmoe plan --config {source} prints it",
        )
    return float(found[0][0]), found[0][1] == " on CPU"


def _conversation(config: Config, hf: Mapping[str, Any]) -> int:
    """Tokens of the longest (`asyncmoe.rollout.episodes.environments.bounds`)."""
    limits = (config.environment.max_tokens, hf.get("max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=config.trainer.tokens_per_microbatch)


def _number(arguments: Sequence[str], name: str, default: int) -> int:
    """What follows the last `name`, or stands behind a "=" in it."""
    given = default
    for at, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag == name:
            text = value or "".join(arguments[at + 1 : at + 2])
            if not text.isdecimal():
                raise UserError(f"engines.args: {name}", got=repr(text), expected="a number")
            given = int(text)
    return given


def _is_given(arguments: Sequence[str], name: str) -> bool:
    return any(argument.partition("=")[0] == name for argument in arguments)


def _sum(side: str, memory: GpuMemory) -> str:
    parts = " + ".join(f"{name} {_gb(nbytes)}" for name, nbytes in memory.parts.items())
    return f"# memory of {side}: {parts}"


def _gb(nbytes: int) -> str:
    """Three digits."""
    return f"{nbytes / 1e9:.3g}"
