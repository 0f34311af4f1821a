"""The one configuration of a run: YAML in, frozen validated values out.

Every process of a run reads the same file. Unknown keys, wrong types and impossible values are refused with the path of the
key, what was got, and what was expected. Combinations that need the model's shape are refused by `asyncmoe.models.check`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from asyncmoe.errors import ConfigError


def _not_bool(value: Any) -> Any:
    # pydantic takes true for 1. Strict numbers would refuse 1e-6 too, which YAML 1.1 reads as text.
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


def _switch(value: Any) -> Any:
    # YAML 1.1 reads an unquoted on or off as a truth value.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Whole = Annotated[int, BeforeValidator(_not_bool)]
Real = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
Positive = Annotated[Whole, Field(gt=0)]
NonNegative = Annotated[Whole, Field(ge=0)]
PositiveFloat = Annotated[Real, Field(gt=0)]
NonNegativeFloat = Annotated[Real, Field(ge=0)]
Decay = Annotated[Real, Field(ge=0, lt=1)]
Port = Annotated[NonNegative, Field(le=65535)]


class Section(BaseModel):
    """A frozen part of the configuration that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class RunSection(Section):
    """What the run is called, where it writes, how long it lasts."""

    dir: Path = Field(description="Directory of everything the run writes; a second start with the same directory resumes.")
    steps: Positive = Field(description="Reinforcement-learning steps, after the warm-up.")
    seed: NonNegative = Field(0, description="Seed of every random draw: prompts, sampling, dropout.")
    resume: bool = Field(True, description="Go on from the newest checkpoint in `dir`; false refuses a directory that has one.")


class MadeModel(Section):
    """A tiny random model to write at `model.path` when nothing is there yet (`asyncmoe make-model` writes the same)."""

    layers: Positive = 2
    hidden: Positive = 64
    heads: Positive = 4
    kv_heads: Positive = 2
    head_dim: Positive = 32
    experts: Positive = 8
    experts_per_token: Positive = 2
    expert_hidden: Positive = 64
    context: Positive = 2048


class ModelSection(Section):
    """The Hugging Face checkpoint that training starts from."""

    path: Path = Field(description="Directory with config.json, safetensors and a tokenizer.")
    make: MadeModel | None = Field(None, description="Write a tiny random Qwen3-MoE at `path` when it does not exist.")


class TaskSection(Section):
    """What is asked and how answers are scored."""

    kind: Literal["arithmetic", "jsonl"]
    operations: tuple[Literal["+", "-", "*"], ...] = Field(("+",), description="arithmetic: operators drawn from.")
    difficulty: Positive = Field(1, description="arithmetic: decimal digits of each operand.")
    path: Path | None = Field(None, description='jsonl: file with one {"question": ..., "answer": ...} a line, as GSM8K.')
    chat_template: bool = Field(True, description="jsonl: put the question through the tokenizer's chat template.")
    scorer: str = Field(
        "auto",
        description="auto (exact for arithmetic, math_verify for jsonl), exact, math_verify, or a dotted path `package.module:function`.",
    )
    scorer_timeout_s: PositiveFloat = 10.0

    @model_validator(mode="after")
    def _check(self) -> TaskSection:
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("task.path: got nothing, expected the path of a JSONL file because task.kind is jsonl")
        if not self.operations:
            raise ValueError("task.operations: got an empty list, expected at least one of + - *")
        return self


class RolloutSection(Section):
    """How responses are sampled."""

    groups_per_step: Positive = Field(16, description="Prompts in a training step.")
    group_size: Positive = Field(8, description="Responses to each prompt.")
    max_new_tokens: Positive = 16
    temperature: PositiveFloat = 1.0
    max_concurrent: Positive = Field(64, description="Episodes in flight over all engines.")
    request_timeout_s: PositiveFloat = 300.0

    @property
    def batch(self) -> int:
        """Trajectories in a training step."""
        return self.groups_per_step * self.group_size


class EngineSection(Section):
    """The SGLang servers."""

    count: Positive = 1
    tp: Positive = 1
    ep: Positive = 1
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    python: Path | None = Field(
        None, description="Python that has SGLang; default: `.venv-engine` beside this environment, else this Python."
    )
    host: str = "127.0.0.1"
    port: Port = Field(0, description="First port; engine i takes port + i. 0: any free ports.")
    max_running: Positive = 16
    max_total_tokens: Positive | None = None
    start_timeout_s: PositiveFloat = 180.0
    args: tuple[str, ...] = Field((), description="Further arguments for sglang.launch_server.")


class StalenessSection(Section):
    """How old a trajectory may be, in versions."""

    eta: NonNegative = Field(1, description="Capacity law: start only while accepted + running < (eta + version + 1) * batch.")
    rule: Literal["drop"] = Field("drop", description="What happens to a trajectory whose oldest token is more than eta versions old.")


class QueueSection(Section):
    """The bounded queue between engines and trainer."""

    staleness: StalenessSection = StalenessSection()
    capacity: Positive | None = Field(None, description="Trajectories it holds before `put` waits; default (eta + 1) * batch.")
    lease_timeout_s: PositiveFloat = Field(600.0, description="How long the trainer waits for a batch before it gives up.")


class OptimizerSection(Section):
    """Adam, its schedule and gradient clipping."""

    lr: PositiveFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    warmup_steps: NonNegative = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: PositiveFloat = 1.0
    distributed: bool = Field(False, description="Shard the optimizer's state over data-parallel ranks (Megatron's distributed optimizer).")


class TrainerSection(Section):
    """The Megatron process group."""

    ranks: Positive = Field(1, description="Processes torchrun starts on this machine.")
    tp: Positive = 1
    pp: Positive = 1
    ep: Positive = 1
    vpp: Positive = Field(1, description="Model chunks a pipeline stage holds; the trainer runs one.")
    first_stage_layers: Positive | None = Field(None, description="Layers of the first pipeline stage; default: an equal share.")
    last_stage_layers: Positive | None = Field(None, description="Layers of the last pipeline stage; default: an equal share.")
    etp: Positive | None = Field(None, description="Expert tensor parallelism; default 1 when ep > 1, else tp.")
    dtype: Literal["float32", "bfloat16", "auto"] = Field("auto", description="auto: float32 on CPU, bfloat16 on GPU.")
    pack: bool = Field(True, description="Pack sequences of a micro-batch into one row; false: one sequence a micro-batch.")
    tokens_per_microbatch: Positive = Field(4096, description="Upper bound of a packed micro-batch; a longer sequence gets its own.")
    recompute: Literal["none", "full"] = "none"
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint_every: NonNegative = Field(0, description="Steps between checkpoints; 0: only at the end and on Ctrl-C.")
    keep_checkpoints: Positive = 2
    timeout_s: PositiveFloat = Field(600.0, description="Collectives that wait longer than this end the run.")

    @property
    def expert_tp(self) -> int:
        return self.etp if self.etp is not None else (1 if self.ep > 1 else self.tp)

    @model_validator(mode="after")
    def _check(self) -> TrainerSection:
        if self.ranks % (self.tp * self.pp):
            raise ValueError(
                f"trainer.ranks: got {self.ranks}, expected a multiple of tp * pp = {self.tp * self.pp}; change trainer.ranks, tp or pp"
            )
        experts = self.expert_tp * self.ep * self.pp
        if self.ranks % experts:
            raise ValueError(f"trainer.ranks: got {self.ranks}, expected a multiple of etp * ep * pp = {experts}; change trainer.ep or etp")
        if self.ep == 1 and self.expert_tp != self.tp:
            raise ValueError(
                f"trainer.etp: got {self.expert_tp}, expected tp = {self.tp} because ep is 1 (megatron-core 0.16 does not reduce "
                "expert gradients over tp otherwise); leave etp out or raise ep"
            )
        if self.vpp > 1:
            raise ValueError(
                f"trainer.vpp: got {self.vpp}, expected 1; the trainer's schedule does not interleave model chunks (`asyncmoe plan` does "
                "plan for trainers that do)"
            )
        for key in ("first_stage_layers", "last_stage_layers"):
            if self.pp == 1 and getattr(self, key) is not None:
                raise ValueError(f"trainer.{key}: got {getattr(self, key)}, expected nothing because trainer.pp is 1; leave it out")
        return self


class ObjectiveSection(Section):
    """The loss of a reinforcement-learning step."""

    advantage: Literal["grpo", "grpo_no_std"] = Field(
        "grpo", description="Group mean subtracted; grpo also divides by the group's deviation."
    )
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    proximal: Literal["recompute", "behaviour"] = Field(
        "recompute",
        description="Denominator of the clipped ratio: the trainer's own log-probabilities before the step, or the engine's.",
    )
    tis_cap: PositiveFloat | None = Field(2.0, description="Token-level truncated importance sampling min(ratio, cap); null: off.")
    updates_per_batch: Positive = Field(1, description="Optimizer steps a batch is cut into.")
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"

    @model_validator(mode="after")
    def _check(self) -> ObjectiveSection:
        if self.proximal == "behaviour" and self.tis_cap is not None:
            raise ValueError(
                f"objective.tis_cap: got {self.tis_cap}, expected null because objective.proximal is behaviour (the ratio to the engine "
                "would be applied twice)"
            )
        return self


class WarmupSection(Section):
    """Supervised steps on the task's own demonstrations before reinforcement learning."""

    steps: NonNegative = 0
    batch: Positive = 64
    lr: PositiveFloat = 1e-3
    wrong_share: float = Field(
        0.0, ge=0, lt=1, description="arithmetic: share of demonstrations with a wrong answer, an imperfect teacher to improve on."
    )


class SyncSection(Section):
    """How new weights reach the engines."""

    method: Literal["reshard", "broadcast"] = Field(
        "reshard",
        description="reshard: every engine rank gets its own bytes from the ranks that have them while it generates, and pauses to swap; "
        "broadcast: rank 0 gathers whole tensors and sends all of them to every engine, which stands still.",
    )
    transport: Literal["auto", "shm", "gloo", "nccl", "ipc"] = Field(
        "auto",
        description="How reshard's messages travel. Between CPUs, shm: memory that processes of one host share; gloo: TCP. Between GPUs, "
        "nccl; ipc: memory of GPUs of one host. auto: shm, or nccl.",
    )
    staging: bool = Field(
        True,
        description="Whether engines receive a version into memory of its own while they generate. Without, reshard writes their "
        "parameters while they stand still.",
    )
    every: Positive = Field(1, description="Optimizer steps between versions.")
    bucket_bytes: Positive = Field(256 << 20, description="Bound of a rank's messages under way; there are two such buckets.")
    verify_every: NonNegative = Field(0, description="Compare the engines' checksums with the trainer's weights every n updates; 0: never.")
    timeout_s: PositiveFloat = 300.0


class TelemetrySection(Section):
    """What a run shows."""

    live: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    tensorboard: bool = True
    prometheus_port: Annotated[Positive, Field(le=65535)] | None = None


class Config(Section):
    """All of it."""

    run: RunSection
    model: ModelSection
    task: TaskSection
    rollout: RolloutSection = RolloutSection()
    engines: EngineSection = EngineSection()
    queue: QueueSection = QueueSection()
    trainer: TrainerSection = TrainerSection()
    objective: ObjectiveSection = ObjectiveSection()
    warmup: WarmupSection = WarmupSection()
    sync: SyncSection = SyncSection()
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.rollout.group_size < 2:
            raise ValueError("rollout.group_size: got 1, expected at least 2; advantages compare the responses to one prompt")
        if self.rollout.groups_per_step % self.objective.updates_per_batch:
            raise ValueError(
                f"objective.updates_per_batch: got {self.objective.updates_per_batch}, expected a divisor of "
                f"rollout.groups_per_step = {self.rollout.groups_per_step}"
            )
        if self.sync.every > self.queue.staleness.eta + 1:
            raise ValueError(
                f"sync.every: got {self.sync.every}, expected at most queue.staleness.eta + 1 = {self.queue.staleness.eta + 1}; with fewer "
                "versions than batches the capacity law would never admit the next batch"
            )
        if self.queue_capacity < self.rollout.batch:
            raise ValueError(
                f"queue.capacity: got {self.queue.capacity}, expected at least a step's batch of rollout.groups_per_step * "
                f"rollout.group_size = {self.rollout.batch}; leave it out or raise it"
            )
        if self.engines.tp % self.engines.ep:
            raise ValueError(f"engines.ep: got {self.engines.ep}, expected a divisor of engines.tp = {self.engines.tp}")
        return self

    @property
    def queue_capacity(self) -> int:
        """Trajectories the queue holds before `put` waits."""
        return self.queue.capacity or (self.queue.staleness.eta + 1) * self.rollout.batch

    @property
    def digest(self) -> str:
        """SHA-256 of every value in hex; two processes with the same one run the same configuration."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def trainer_data_parallel(self) -> int:
        return self.trainer.ranks // (self.trainer.tp * self.trainer.pp)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `key.path=value` overrides; values are parsed as YAML.

    Raises:
        ConfigError: no such file, not YAML, or a key, type or value that is refused.
    """
    if not path.is_file():
        raise ConfigError(str(path), got="no such file", expected="a YAML configuration")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), got=" ".join(str(error).split()), expected="valid YAML") from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), got=type(values).__name__, expected="a mapping of sections")
    for override in overrides:
        _override(values, override)
    return parse(values, source=str(path))


def parse(values: dict[str, Any], source: str = "config") -> Config:
    """Validate plain values.

    Raises:
        ConfigError: for the first thing that is wrong, with the path of its key.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error, source) from None


def _override(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError("override", got=repr(override), expected="key.path=value")
    *parents, last = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {path}", got=f"{parent} is not a section", expected="a section")
    try:
        values[last] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {path}", got=repr(text), expected="a YAML value") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(_section_at(first["loc"][:-1]).model_fields)
        return ConfigError(f"{source}: {key}", got="an unknown key", expected=f"one of {known}")
    if first["type"] == "missing":
        return ConfigError(f"{source}: {key}", got="nothing", expected="a value")
    if first["type"] == "model_type":
        return ConfigError(f"{source}: {key}", got=repr(first["input"]), expected="a section (a mapping of keys)")
    if first["type"] == "value_error":
        what, _, rest = str(first["ctx"]["error"]).partition(": got ")
        got, _, expected = rest.partition(", expected ")
        return ConfigError(f"{source}: {what}", got=got, expected=expected)
    message = first["msg"]
    expected = message[0].lower() + message[1:].removeprefix("Input should be ") if not message.startswith("Input") else message[16:]
    return ConfigError(f"{source}: {key}", got=repr(first["input"]), expected=expected)


def _section_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return section
