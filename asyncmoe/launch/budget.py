"""The memory a configured run asks of its GPUs, and the line in which its YAML says so."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.launch import memory
from asyncmoe.launch.activations import Microbatch
from asyncmoe.launch.memory import Memory, Serving, Training
from asyncmoe.models import EngineParallel, adapter_of, engine_dtype, load_hf_config, make, trainer_parallel
from asyncmoe.reshard import nccl_room

CPU_GB = 2.0
"""What each process of a run without GPUs is given."""
_PREFILL = "--chunked-prefill-size"
_LINE = re.compile(r"^# memory: trainer \S+ GB, engine \S+ GB of (\d+(?:\.\d+)?)( on CPU)?$", re.MULTILINE)


@dataclass(frozen=True)
class Budget:
    """What a run asks for.

    Attributes:
        trainer: of a rank of the pipeline stage that holds most.
        engine: of the rank that holds most.
        gpu_gb: memory of each GPU, or what each process may take on a CPU.
        cpu: the run is for machines without GPUs.
    """

    trainer: Memory
    engine: Memory
    gpu_gb: float
    cpu: bool = False

    @property
    def line(self) -> str:
        """What a YAML says of itself."""
        where = " on CPU" if self.cpu else ""
        return f"# memory: trainer {_gb(self.trainer.total)} GB, engine {_gb(self.engine.total)} GB of {self.gpu_gb:g}{where}"

    @property
    def sums(self) -> tuple[str, str]:
        """How that comes about, as a YAML says it."""
        return _sum("the trainer", self.trainer), _sum("an engine", self.engine)

    @property
    def fits(self) -> bool:
        return self.trainer.fits(self.gpu_gb) and self.engine.fits(self.gpu_gb)


def of_run(config: Config, hf: Mapping[str, Any], gpu_gb: float = 80.0, cpu: bool = False) -> Budget:
    """The budget of a configuration whose sizes suit the model (`asyncmoe.models.check`).

    Raises:
        ConfigError: they do not.
        UserError: an argument for engines that is no number.
    """
    stages = memory.trainer(hf, trainer_parallel(config), training(config, hf, cpu))
    engine = memory.engine(hf, EngineParallel(config.engines.tp, config.engines.ep), serving(config, hf, cpu))
    return Budget(max(stages, key=lambda stage: stage.total), engine, gpu_gb, cpu)


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
    """A run that nobody would start on GPUs: of a tiny model that it makes itself, or in float32."""
    return config.model.make is not None or config.trainer.dtype == "float32"


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
    distributed, reference = trainer.optimizer.distributed, objective.kl.coefficient > 0
    return Training(microbatch, distributed, reference, config.sync.bucket_bytes, _communicators(config, cpu, config.engines.count))


def serving(config: Config, hf: Mapping[str, Any], cpu: bool = False) -> Serving:
    """The same of engines. Where `engines.max_total_tokens` is not given SGLang takes whatever --mem-fraction-static leaves it: here it is
    given what `engines.max_running` conversations can need.

    Raises:
        UserError: an argument for engines that is no number.
    """
    section = config.engines
    return Serving(
        tokens=section.max_total_tokens or section.max_running * _conversation(config, hf),
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
    if cpu or sync.method != "reshard" or sync.transport not in ("auto", "nccl"):
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
    return float(found[0][0]), bool(found[0][1])


def _conversation(config: Config, hf: Mapping[str, Any]) -> int:
    """Tokens of the longest (`asyncmoe.rollout.environments.bounds`)."""
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


def _sum(side: str, memory: Memory) -> str:
    parts = " + ".join(f"{name} {_gb(nbytes)}" for name, nbytes in memory.parts.items())
    return f"# memory of {side}: {parts}"


def _gb(nbytes: int) -> str:
    """Three digits."""
    return f"{nbytes / 1e9:.3g}"
