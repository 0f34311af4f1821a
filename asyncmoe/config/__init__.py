"""The configuration of a run: YAML in, frozen validated values out.

Every process of a run reads the same file. Unknown keys, wrong types and impossible values are refused with the key's path, the value
given and the value expected. `asyncmoe.models.check` refuses combinations that need the model's shape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from asyncmoe.config.transports import choices, shareable, unshared
from asyncmoe.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_SUPPORT = 4096
"""SGLang's --sampling-mask-max-tokens."""


class RunSection(Section):
    """Where the run writes, how long it lasts, and how engines and trainer take turns."""

    dir: Path = Field(
        description="Run directory: checkpoints, logs, records and the report. Starting again with the same directory resumes the run."
    )
    steps: Positive = Field(description="Reinforcement-learning steps, not counting warmup.steps.")
    mode: Literal["async", "sync", "one_step_off"] = Field(
        "async",
        description="async: engines and trainer run at the same time, within queue.staleness.eta. The other two are baselines. sync: each "
        "batch is sampled by the weights it is trained from, so engines and trainer take turns (sets eta 0). one_step_off: a batch is "
        "sampled while the previous one is trained, and finishes before new weights land (sets eta 1 and rollout.interruption drain).",
    )
    seed: NonNegative = Field(0, description="Seed of every random draw: prompts, sampling, dropout.")
    resume: bool = Field(True, description="Resume from the newest checkpoint in `dir`; if false, fail when a checkpoint exists.")


class TelemetrySection(Section):
    """Live view and export of metrics. Records, logs and the report are always written."""

    live: Annotated[Literal["auto", "on", "off"], Switch] = Field("auto", description="Live view of the run; auto: only on a terminal.")
    tensorboard: bool = Field(True, description="Also write TensorBoard files, to run.dir/tensorboard.")
    prometheus_port: Annotated[Positive, Field(le=65535)] | None = Field(
        None, description="Loopback port that serves the run's gauges to Prometheus; null: no port is opened."
    )


class Config(Section):
    """The whole configuration."""

    run: RunSection
    model: ModelSection
    task: TaskSection
    environment: EnvironmentSection = EnvironmentSection()
    scoring: ScoringSection = ScoringSection()
    rollout: RolloutSection = RolloutSection()
    keep: KeepSection = KeepSection()
    engines: EngineSection = EngineSection()
    queue: QueueSection = QueueSection()
    train: Literal["full", "lora"] = Field("full", description="full: train all weights. lora: freeze them and train adapters (`lora`).")
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
        "local", description="Where `asyncmoe run` starts processes. local: this machine; ray: a placement group of a Ray cluster."
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        """Set the keys that `run.mode` implies; refuse values that contradict it."""
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
        """Refuse an objective without the rewards, steps or teacher it learns from."""
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
        """Refuse what shared GPUs rule out: NCCL, which refuses two ranks on one GPU, and runs on several machines."""
        if not self.engines.share_gpus:
            return self
        because = "because engines.share_gpus is true"
        why = unshared(self.sync.transport)
        refused = {
            "sync.method": (self.sync.method, self.sync.method == "broadcast", f"reshard {because}: NCCL refuses two ranks on one GPU"),
            "sync.transport": (self.sync.transport, why != "", f"{choices(shareable)} {because}: {why}"),
            "launch": (self.launch, self.launch == "ray", f"local {because}: Ray gives every process GPUs of its own"),
        }
        for key, (got, bad, expected) in refused.items():
            if bad:
                raise ValueError(f"{key}: got {got}, expected {expected}; change it, or set engines.share_gpus to false")
        if self.cluster.network != "loopback":
            raise ValueError(
                f"cluster.network: got {self.cluster.network}, expected loopback {because}: the trainer and all engines are on one "
                "machine; leave it out, or set engines.share_gpus to false"
            )
        return self

    @property
    def adapter(self) -> LoraSection | None:
        """The adapters to train in place of the weights, or None."""
        return self.lora if self.train == "lora" else None

    @property
    def keeps_sampling_mask(self) -> bool:
        """True if engines report the ids each token was sampled from; trajectories without them are refused."""
        return self.rollout.truncated if self.keep.sampling_mask == "auto" else self.keep.sampling_mask == "on"

    @property
    def queue_capacity(self) -> int:
        """Trajectories the queue holds before `put` waits."""
        return self.queue.capacity or (self.queue.staleness.eta + 1) * self.rollout.batch

    @property
    def digest(self) -> str:
        """SHA-256 in hex of every value except paths, which may differ between machines. Processes of one run have equal digests."""
        return hashlib.sha256(json.dumps(_without_paths(self.model_dump()), sort_keys=True).encode()).hexdigest()

    @property
    def trainer_data_parallel(self) -> int:
        return self.trainer.ranks // (self.trainer.tp * self.trainer.pp)


_IMPLIED: Mapping[str, Mapping[tuple[str, ...], Any]] = {
    "sync": {("queue", "staleness", "eta"): 0},
    "one_step_off": {("queue", "staleness", "eta"): 1, ("rollout", "interruption"): "drain"},
}
"""The keys each `run.mode` sets."""


def _without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values without the paths."""
    kept = {key: _without_paths(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if not isinstance(value, Path)}


def _imply(section: Any, path: Sequence[str], implied: Any, key: str, mode: str) -> Any:
    """Return `section` with the key at `path` set to `implied`; type validation reports a section that is no mapping.

    Raises:
        ValueError: the section sets the key to another value.
    """
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


@dataclass(frozen=True)
class Source:
    """Where values come from, for messages.

    Attributes:
        name: of the file.
        lines: line in the file by path of the key; keys of overrides have none.
    """

    name: str
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def at(self, key: Sequence[str]) -> str:
        """Return "FILE:LINE", or the file alone if the key is not in it."""
        line = self.lines.get(tuple(key))
        return self.name if line is None else f"{self.name}:{line}"


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `key.path=value` overrides; values are parsed as YAML.

    Raises:
        ConfigError: the file is missing or not YAML, or a key, type or value is refused; every refused key has a line.
    """
    if not path.is_file():
        raise ConfigError(str(path), got="no such file", expected="a YAML configuration")
    try:
        with path.open(encoding="utf-8") as file:
            node = yaml.compose(file, Loader=_Loader)
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), got=" ".join(str(error).split()), expected="valid YAML") from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), got=type(values).__name__, expected="a mapping of sections")
    lines = dict(_lines(node))
    for override in overrides:
        _override(values, override)
        lines.pop(tuple(override.partition("=")[0].split(".")), None)
    return _validated(values, Source(str(path), lines))


def parse(values: dict[str, Any], source: str = "config") -> Config:
    """Validate plain values.

    Raises:
        ConfigError: names every invalid value with the path of its key, a line each.
    """
    return _validated(values, Source(source))


def _validated(values: dict[str, Any], source: Source) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first, *others = _explain(error, source)
        if others:
            first.args = ("\n".join(str(one) for one in (first, *others)),)
        raise first from None


def _lines(node: yaml.Node | None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the path of every key of a mapping with its line, counted from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, str(key.value)), key.start_mark.line + 1
            yield from _lines(value, (*path, str(key.value)))


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
    """SafeLoader that refuses duplicate keys; YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _explain(error: ValidationError, source: Source) -> list[ConfigError]:
    """Return an error for each invalid key, in the order of the schema. Not empty."""
    found: dict[str, ConfigError] = {}
    for one in error.errors():
        made = _explained(one, source)
        found.setdefault(made.what, made)  # a union reports a value once for each of its types
    return list(found.values())


def _explained(one: ErrorDetails, source: Source) -> ConfigError:
    parts = tuple(str(part) for part in one["loc"])
    what = f"{source.at(parts)}: {'.'.join(parts)}"
    if one["type"] == "extra_forbidden":
        return _unknown(one["loc"], what)
    if one["type"] == "missing":
        return ConfigError(what, got="nothing", expected="a value")
    if one["type"] == "model_type":
        return ConfigError(what, got=repr(one["input"]), expected="a section (a mapping of keys)")
    if one["type"] == "value_error":
        key, _, rest = str(one["ctx"]["error"]).partition(": got ")
        got, _, expected = rest.partition(", expected ")
        return ConfigError(f"{source.at(key.split('.'))}: {key}", got=got, expected=expected)
    message = one["msg"]
    expected = message[0].lower() + message[1:].removeprefix("Input should be ") if not message.startswith("Input") else message[16:]
    return ConfigError(what, got=repr(one["input"]), expected=expected)


def _unknown(location: tuple[int | str, ...], what: str) -> ConfigError:
    """Refuse an unknown key; suggest a key of the section with nearly this name, or the keys of this name elsewhere."""
    *section, name = (str(part) for part in location)
    fields = list(_section_at(location[:-1]).model_fields)
    near = [".".join((*section, one)) for one in get_close_matches(name, fields, 1)]
    elsewhere = [key for key in _keys(Config) if key.rpartition(".")[2] == name]
    meant = near or elsewhere[:3]
    cure = f"did you mean {' or '.join(meant)}?" if meant else None
    return ConfigError(what, got="an unknown key", expected=f"one of {', '.join(fields)}", cure=cure)


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key of the schema."""
    for name, one in section.model_fields.items():
        yield prefix + name
        for option in (one.annotation, *getattr(one.annotation, "__args__", ())):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _keys(option, f"{prefix}{name}.")


def _section_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return section
