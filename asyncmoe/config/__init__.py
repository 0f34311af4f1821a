"""The one configuration of a run: YAML in, frozen validated values out.

Every process of a run reads the same file. Unknown keys, wrong types and impossible values are refused with the path of the
key, what was got, and what was expected. Combinations that need the model's shape are refused by `asyncmoe.models.check`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from asyncmoe.config.cluster import ClusterSection
from asyncmoe.config.environment import EnvironmentSection
from asyncmoe.config.evaluation import EvaluationSection
from asyncmoe.config.fields import NonNegative, Positive, Section, Switch
from asyncmoe.config.generation import EngineSection, KeepSection, ModelSection, QueueSection, RolloutSection, TaskSection
from asyncmoe.config.lora import LoraSection
from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.training import SyncSection, TrainerSection, VerifySection, WarmupSection
from asyncmoe.errors import ConfigError

MAX_SUPPORT = 4096
"""SGLang's --sampling-mask-max-tokens."""


class RunSection(Section):
    """What the run is called, where it writes, how long it lasts."""

    dir: Path = Field(description="Directory of everything the run writes; a second start with the same directory resumes.")
    steps: Positive = Field(description="Reinforcement-learning steps, after the warm-up.")
    mode: Literal["async", "sync", "one_step_off"] = Field(
        "async",
        description="async: engines and trainer never wait for each other, within queue.staleness.eta. To compare with: sync: a batch is "
        "sampled by the weights it is trained from, so the two take turns (eta 0); one_step_off: a batch is sampled while the one before "
        "it is trained, and finished before new weights land (eta 1, rollout.interruption drain).",
    )
    seed: NonNegative = Field(0, description="Seed of every random draw: prompts, sampling, dropout.")
    resume: bool = Field(True, description="Go on from the newest checkpoint in `dir`; false refuses a directory that has one.")


class TelemetrySection(Section):
    """What a run shows."""

    live: Annotated[Literal["auto", "on", "off"], Switch] = Field("auto", description="The live view; auto: on a terminal.")
    tensorboard: bool = Field(True, description="Write TensorBoard files to run.dir/tensorboard.")
    prometheus_port: Annotated[Positive, Field(le=65535)] | None = Field(
        None, description="Loopback port at which Prometheus finds the run's gauges; null: none."
    )


class Config(Section):
    """All of it."""

    run: RunSection
    model: ModelSection
    task: TaskSection
    environment: EnvironmentSection = EnvironmentSection()
    scoring: ScoringSection = ScoringSection()
    rollout: RolloutSection = RolloutSection()
    keep: KeepSection = KeepSection()
    engines: EngineSection = EngineSection()
    queue: QueueSection = QueueSection()
    train: Literal["full", "lora"] = Field("full", description="full: all weights. lora: adapters (`lora`); the weights stay as they are.")
    trainer: TrainerSection = TrainerSection()
    lora: LoraSection = LoraSection()
    objective: ObjectiveSection = ObjectiveSection()
    warmup: WarmupSection = WarmupSection()
    sync: SyncSection = SyncSection()
    verify: VerifySection = VerifySection()
    evaluation: EvaluationSection = EvaluationSection()
    telemetry: TelemetrySection = TelemetrySection()
    cluster: ClusterSection = ClusterSection()
    launch: Literal["local", "ray"] = Field(
        "local", description="What `asyncmoe run` uses. local: this machine; ray: placement groups of a Ray cluster."
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        """What `run.mode` implies where the user says nothing, and a refusal where they say something else."""
        run = values.get("run") if isinstance(values, dict) else None
        mode = run.get("mode") if isinstance(run, dict) else None
        if isinstance(mode, str):
            for (section, *path), implied in _IMPLIED.get(mode, {}).items():
                values = {**values, section: _imply(values.get(section, {}), path, implied, ".".join((section, *path)), mode)}
        return values

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
        if self.keeps_sampling_mask and self.rollout.top_k is None:
            raise ValueError(
                "rollout.top_k: got null, expected a number because sampling masks are kept (engines report only supports of bounded "
                "size); set rollout.top_k, or keep.sampling_mask to off"
            )
        if self.keeps_sampling_mask and self.rollout.top_k is not None and self.rollout.top_k > MAX_SUPPORT:
            raise ValueError(
                f"rollout.top_k: got {self.rollout.top_k}, expected at most {MAX_SUPPORT} because sampling masks are kept (engines report "
                "no larger supports); lower it, or set keep.sampling_mask to off"
            )
        if (self.evaluation.max_concurrent or 0) > self.rollout.max_concurrent:
            raise ValueError(
                f"evaluation.max_concurrent: got {self.evaluation.max_concurrent}, expected at most rollout.max_concurrent = "
                f"{self.rollout.max_concurrent}, of which it is a share; lower it or leave it out"
            )
        if self.trainer.ranks % self.cluster.trainer_nodes:
            raise ValueError(
                f"cluster.trainer_nodes: got {self.cluster.trainer_nodes}, expected a divisor of trainer.ranks = {self.trainer.ranks}; "
                "every node of the trainer has as many of them"
            )
        if self.engines.tp % self.engines.ep:
            raise ValueError(f"engines.ep: got {self.engines.ep}, expected a divisor of engines.tp = {self.engines.tp}")
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Config:
        """What the objective learns from is there."""
        if self.rollout.filter_equal and self.objective.advantage == "reinforce_plus_plus":
            raise ValueError(
                "rollout.filter_equal: got true, expected false because objective.advantage is reinforce_plus_plus, to which a group of "
                "equal rewards carries an advantage; set it to false, or choose an advantage that compares within the group"
            )
        for name, weight in (("process", self.objective.process.weight), ("distill", self.objective.distill.weight)):
            if self.rollout.filter_equal and weight:
                raise ValueError(
                    f"rollout.filter_equal: got true, expected false because objective.{name}.weight is {weight:g}, and a group of equal "
                    "rewards has steps or tokens to learn from; set it to false"
                )
        if self.objective.distill.weight and self.scoring.teacher is None:
            raise ValueError(
                f"objective.distill.weight: got {self.objective.distill.weight:g}, expected 0 because there is no scoring.teacher; name "
                "one, or set the weight to 0"
            )
        if self.objective.process.weight and self.environment.kind == "single_turn" and not self.scoring.may_score_steps:
            raise ValueError(
                f"objective.process.weight: got {self.objective.process.weight:g}, expected 0 because scoring.scorer is "
                f"{self.scoring.scorer}, which does not score steps; name a scorer of your own, or set the weight to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_sharing(self) -> Config:
        """What sharing GPUs rules out: NCCL, which refuses two ranks on one, and a run of several machines."""
        if not self.engines.share_gpus:
            return self
        because = "because engines.share_gpus is true"
        refused = {
            "sync.method": (self.sync.method, "broadcast", f"reshard {because}: NCCL refuses two ranks on one GPU"),
            "sync.transport": (self.sync.transport, "nccl", f"auto or ipc {because}: NCCL refuses two ranks on one GPU"),
            "launch": (self.launch, "ray", f"local {because}: Ray gives every process GPUs of its own"),
        }
        for key, (got, bad, expected) in refused.items():
            if got == bad:
                raise ValueError(f"{key}: got {got}, expected {expected}; change it, or set engines.share_gpus to false")
        if self.cluster.network != "loopback":
            raise ValueError(
                f"cluster.network: got {self.cluster.network}, expected loopback {because}: the trainer and all engines are on one "
                "machine; leave it out, or set engines.share_gpus to false"
            )
        return self

    @property
    def adapter(self) -> LoraSection | None:
        """What is trained in place of the weights, if anything is."""
        return self.lora if self.train == "lora" else None

    @property
    def keeps_sampling_mask(self) -> bool:
        """Engines report the ids each token was sampled from, and trajectories without them are refused."""
        return self.rollout.truncated if self.keep.sampling_mask == "auto" else self.keep.sampling_mask == "on"

    @property
    def queue_capacity(self) -> int:
        """Trajectories the queue holds before `put` waits."""
        return self.queue.capacity or (self.queue.staleness.eta + 1) * self.rollout.batch

    @property
    def digest(self) -> str:
        """SHA-256 in hex of every value but paths, which may differ between machines; with the same one two processes do the same."""
        return hashlib.sha256(json.dumps(_without_paths(self.model_dump()), sort_keys=True).encode()).hexdigest()

    @property
    def trainer_data_parallel(self) -> int:
        return self.trainer.ranks // (self.trainer.tp * self.trainer.pp)


_IMPLIED: Mapping[str, Mapping[tuple[str, ...], Any]] = {
    "sync": {("queue", "staleness", "eta"): 0},
    "one_step_off": {("queue", "staleness", "eta"): 1, ("rollout", "interruption"): "drain"},
}
"""By `run.mode`, the keys it decides."""


def _without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values without those that are paths."""
    kept = {key: _without_paths(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if not isinstance(value, Path)}


def _imply(section: Any, path: Sequence[str], implied: Any, key: str, mode: str) -> Any:
    """A section with a key of it as `mode` wants it. What is no section is left for the validation of types."""
    if not isinstance(section, dict):
        return section
    name, *rest = path
    if rest:
        return {**section, name: _imply(section.get(name, {}), rest, implied, key, mode)}
    if section.get(name, implied) != implied:
        raise ValueError(
            f"{key}: got {section[name]}, expected {implied} because run.mode is {mode}; leave it out, or set run.mode to async"
        )
    return {**section, name: implied}


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
