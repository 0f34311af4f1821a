"""The whole configuration, its checks across sections, and values that follow from several sections."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from asyncmoe import plugins
from asyncmoe.config.cluster import ClusterSection
from asyncmoe.config.engines import EngineSection
from asyncmoe.config.environment import EnvironmentSection
from asyncmoe.config.evaluation import EvaluationSection
from asyncmoe.config.fields import Section, refused, said
from asyncmoe.config.log import LogSection
from asyncmoe.config.lora import LoraSection
from asyncmoe.config.model import ModelSection
from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.config.queue import QueueSection
from asyncmoe.config.rollout import KeepSection, RolloutSection
from asyncmoe.config.run import RunSection, WarmupSection
from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.sync import SyncSection
from asyncmoe.config.task import READ, TaskSection
from asyncmoe.config.telemetry import TelemetrySection
from asyncmoe.config.trainer import TrainerSection
from asyncmoe.config.transports import choices, shareable, unshared
from asyncmoe.config.verify import VerifySection
from asyncmoe.config.watch import WatchSection

LAYOUT: Mapping[str, frozenset[str]] = {
    "trainer": frozenset({"ranks", "tp", "pp", "ep", "cp", "vpp", "etp", "first_stage_layers", "last_stage_layers"}),
    "cluster": frozenset({"trainer_nodes"}),
}
"""Keys by section that only decide how the trainer is spread over ranks."""
MAX_SUPPORT = 4096
"""SGLang's --sampling-mask-max-tokens."""


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
    log: LogSection = LogSection()
    train: Literal["full", "lora"] = "full"
    """full: train all weights. lora: freeze them and train adapters (`lora`)."""
    trainer: TrainerSection = TrainerSection()
    lora: LoraSection = LoraSection()
    objective: ObjectiveSection = ObjectiveSection()
    warmup: WarmupSection = WarmupSection()
    sync: SyncSection = SyncSection()
    verify: VerifySection = VerifySection()
    watch: WatchSection = WatchSection()
    evaluation: EvaluationSection = EvaluationSection()
    telemetry: TelemetrySection = TelemetrySection()
    cluster: ClusterSection = ClusterSection()
    placement: Literal["split", "colocated"] = "split"
    """split: trainer and engines have devices of their own. colocated: they use the same devices in turn; while one works, the other's
    memory is free or on the host (sets run.mode sync and rollout.interruption abort_resume)."""
    launch: Literal["local", "ray"] = "local"
    """Where `asyncmoe run` starts processes. local: this machine; ray: a placement group of a Ray cluster."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        """Set the keys that `placement` and `run.mode` imply; refuse values that contradict them."""
        for key in ("placement", "run.mode"):
            value: Any = values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            for path, implied in _IMPLIED.get((key, value), {}).items() if isinstance(value, str) else ():
                values = _imply(values, path, implied, ".".join(path), f"{key} is {value}")
        return values

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.rollout.groups_per_step % self.objective.updates_per_batch:
            expected = f"a divisor of rollout.groups_per_step = {self.rollout.groups_per_step}"
            raise refused("objective.updates_per_batch", self.objective.updates_per_batch, expected)
        if self.sync.every > (most := self.queue.staleness.max_staleness + 1):
            way = "lower it" if self.run.mode == "sync" else "lower it, or raise max_staleness"
            hint = f"{way}: otherwise the queue would never admit the next batch"
            raise refused("sync.every", self.sync.every, f"at most queue.staleness.max_staleness + 1 = {most}", hint)
        if self.queue_capacity < self.rollout.batch:
            expected = f"at least a step's batch of rollout.groups_per_step * rollout.group_size = {self.rollout.batch}"
            raise refused("queue.capacity", self.queue.capacity, expected, "leave it out or raise it")
        if self.max_concurrent < self.rollout.workers:
            expected = f"at least rollout.workers = {self.rollout.workers}: each worker has a request in flight"
            raise refused("rollout.max_concurrent", self.max_concurrent, expected)
        if self.keeps_sampling_mask and self.rollout.top_k is None:
            expected = "a number because sampling masks are kept (engines report bounded masks only)"
            raise refused("rollout.top_k", "null", expected, "set rollout.top_k, or keep.sampling_mask to off")
        if self.keeps_sampling_mask and self.rollout.top_k is not None and self.rollout.top_k > MAX_SUPPORT:
            expected = f"at most {MAX_SUPPORT} because sampling masks are kept (engines report no larger masks)"
            raise refused("rollout.top_k", self.rollout.top_k, expected, "lower it, or set keep.sampling_mask to off")
        if self.trainer.ranks % self.cluster.trainer_nodes:
            expected = f"a divisor of trainer.ranks = {self.trainer.ranks}; every trainer node runs equally many ranks"
            raise refused("cluster.trainer_nodes", self.cluster.trainer_nodes, expected)
        if self.sync.method != "reshard" and self.train == "lora":
            raise refused("sync.method", self.sync.method, "reshard because train is lora; change it, or set train to full")
        if self.sync.method == "disk" and self.engines.quantises:
            raise refused("sync.method", "disk", "broadcast because engines.args quantise the weights; change either key")
        if self.run.deterministic and self.trainer.megatron.moe_token_dispatcher_type == "flex":
            expected = "alltoall because run.deterministic is true, and DeepEP keeps rows in the order in which they arrive"
            raise refused("trainer.megatron.moe_token_dispatcher_type", "flex", expected, "leave either key out")
        return self

    @model_validator(mode="after")
    def _check_engines(self) -> Config:
        nodes, groups = self.engines.nodes, self.engines.dp_attention
        if nodes > 1 and self.train == "lora":
            expected = "1 because train is lora: engines load adapters from files of one machine; lower it, or set train to full"
            raise refused("engines.nodes", nodes, expected)
        if groups > 1 and self.train == "lora":
            raise refused("engines.dp_attention", groups, "1 because train is lora; leave it out, or set train to full")
        if groups > 1 and nodes > 1 and self.cluster.network == "loopback":
            expected = f"1 because engines.nodes is {nodes} on one machine (cluster.network: loopback)"
            raise refused("engines.dp_attention", groups, expected, "lower either key, or name the network")
        if self.engines.max_running % groups:
            raise refused("engines.max_running", self.engines.max_running, f"a multiple of engines.dp_attention = {groups}")
        cache, most = self.engines.max_total_tokens, self.environment.max_tokens
        key, most = ("rollout.max_new_tokens", self.rollout.max_new_tokens) if most is None else ("environment.max_tokens", most)
        if cache is not None and cache // groups < most:
            holds = "it" if groups == 1 else f"each of engines.dp_attention = {groups} groups"
            expected = f"at least {groups * most}: {holds} must hold {key} = {most}"
            raise refused("engines.max_total_tokens", cache, expected)
        return self

    @model_validator(mode="after")
    def _check_task(self) -> Config:
        """Refuse evaluation sets that cannot be read, and a user's own task without a scorer."""
        if plugins.is_name(self.task.kind) and self.scoring.scorer == "auto" and self.environment.kind in ("single_turn", "tools"):
            expected = f"a scorer by name because nothing is known about the answers of task.kind {self.task.kind}"
            raise refused("scoring.scorer", "auto", expected, "name exact, math_verify or your own")
        for name, one in self.evaluation.every_set.items():
            if one.held_out:
                continue
            key = f"evaluation.sets.{name}" if name else "evaluation"
            if one.path is None and self.task.sources and one.kind in (None, *READ):
                raise refused(f"{key}.path", "nothing", "a path because the task has several sources")
            try:
                one.task(self.task)
            except ValidationError as error:
                raise ValueError(str(error.errors()[0]["ctx"]["error"]).replace("task.", f"{key}.")) from None
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Config:
        """Refuse an objective without the rewards, steps, teacher or probabilities it learns from."""
        if self.objective.score_centering and self.rollout.truncated and not self.keeps_sampling_mask:
            expected = "auto or on because objective.score_centering is above 0 and sampling is truncated"
            raise refused("keep.sampling_mask", "off", expected)
        if self.rollout.filter_equal and (advantage := self.objective.advantage) in ("reinforce_plus_plus", "gdpo"):
            expected = f"false because objective.advantage is {advantage}, which gives a group of equal rewards an advantage"
            hint = "set it to false, or choose an advantage that compares within the group"
            raise refused("rollout.filter_equal", "true", expected, hint)
        for name, weight in (("process", self.objective.process.weight), ("distill", self.objective.distill.weight)):
            if self.rollout.filter_equal and weight:
                because = f"because objective.{name}.weight is {weight:g}, and a group of equal rewards has steps or tokens to learn from"
                raise refused("rollout.filter_equal", "true", f"false {because}; set it to false")
        if self.objective.distill.weight and self.scoring.teacher is None:
            expected = "0 because there is no scoring.teacher; name one, or set the weight to 0"
            raise refused("objective.distill.weight", f"{self.objective.distill.weight:g}", expected)
        if self.objective.process.weight and self.environment.kind == "single_turn" and not self.scoring.may_score_steps:
            expected = f"0 because scoring.scorer is {self.scoring.scorer}, which does not score steps"
            hint = "name a scorer of your own, or set the weight to 0"
            raise refused("objective.process.weight", f"{self.objective.process.weight:g}", expected, hint)
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> Config:
        """Refuse to profile steps and ranks that the run does not have."""
        if (profile := self.telemetry.profile) is None:
            return self
        total = self.warmup.steps + self.run.steps
        if max(profile.steps) > total:
            raise refused("telemetry.profile.steps", max(profile.steps), f"at most warmup.steps + run.steps = {total}; lower it")
        if max(profile.ranks) >= self.trainer.ranks:
            raise refused("telemetry.profile.ranks", max(profile.ranks), f"less than trainer.ranks = {self.trainer.ranks}; lower it")
        return self

    @model_validator(mode="after")
    def _check_colocated(self) -> Config:
        """Refuse what needs engines on other machines or GPUs, in Ray's bundles, or with their old weights."""
        allowed: dict[str, tuple[object, object]] = {
            "sync.method": (self.sync.method, "reshard"),
            "sync.delta": (self.sync.delta, "off"),
            "cluster.network": (self.cluster.network, "loopback"),
            "cluster.trainer_nodes": (self.cluster.trainer_nodes, 1),
            "cluster.engine_nodes": (self.cluster.engine_nodes, 1),
            "launch": (self.launch, "local"),
            "engines.join": (self.engines.join, False),
            "engines.nodes": (self.engines.nodes, 1),
            "engines.first_gpu": (self.engines.first_gpu, None),
        }
        for key, (got, only) in allowed.items() if self.in_turn else ():
            if got != only:
                raise refused(key, said(got), f"{said(only)} because placement is colocated; leave either out")
        if self.in_turn and (why := unshared(self.sync.transport)):
            expected = f"{choices(shareable)} because placement is colocated: {why}"
            raise refused("sync.transport", self.sync.transport, expected, "leave it out")
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
    def in_turn(self) -> bool:
        """True if trainer and engines use the same devices in turn."""
        return self.placement == "colocated"

    @property
    def survives_controller(self) -> bool:
        """True if a lost controller can be restarted, with the trainer, while engines wait for it. The log tells the new controller what
        was sampled and trained, and each engine reports whether it holds a whole version."""
        return self.sync.method == "reshard" and self.engines.orphan_s > 0

    @property
    def renews_engines(self) -> bool:
        """True if the run survives losing all engines at once: the trainer sends its weights once more. It has the last version's weights
        only if every step publishes a version."""
        return self.engines.restarts > 0 and self.sync.method == "reshard" and self.sync.every == 1

    @property
    def checkpoint_kind(self) -> dict[str, Any]:
        """What is trained; a run that resumes from a checkpoint must train the same."""
        kind: dict[str, Any] = {"train": self.train}
        if self.adapter is not None:
            kind["lora"] = self.adapter.model_dump(mode="json", include={"rank", "alpha", "targets", "experts"})
        return kind

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints; 0: none are saved at intervals. A recorded window of N steps needs one every N steps."""
        return self.trainer.checkpoint_every or (self.log.keep if isinstance(self.log.keep, int) else 0)

    @property
    def max_concurrent(self) -> int:
        """Requests that may be in flight over all engines: `rollout.max_concurrent`, or as many as the engines decode at once."""
        return self.rollout.max_concurrent or self.engines.count * self.engines.max_running

    def worker_share(self, number: int) -> int:
        """Return the requests that rollout worker `number`, from 1, may have in flight: its share of `max_concurrent`."""
        return self.max_concurrent // self.rollout.workers + (number <= self.max_concurrent % self.rollout.workers)

    @property
    def queue_capacity(self) -> int:
        """Trajectories the queue holds before `put` waits."""
        return self.queue.capacity or (self.queue.staleness.max_staleness + 1) * self.rollout.batch

    @property
    def digest(self) -> str:
        """SHA-256 in hex of every value except what may differ between machines: paths, and the nodes of an engine. Processes of one run
        have equal digests."""
        return hashlib.sha256(json.dumps(self._shared(), sort_keys=True).encode()).hexdigest()

    def _shared(self) -> dict[str, Any]:
        values: dict[str, Any] = _without_paths(self.model_dump())
        values["engines"].pop("nodes")
        return values

    @property
    def digest_without_layout(self) -> str:
        """As `digest`, without the keys of `LAYOUT`, because a run with another layout can load the checkpoints."""
        values = self._shared()
        for section, keys in LAYOUT.items():
            values[section] = {key: value for key, value in values[section].items() if key not in keys}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


_STALENESS = ("queue", "staleness", "max_staleness")
_IMPLIED: Mapping[tuple[str, str], Mapping[tuple[str, ...], Any]] = {
    ("placement", "colocated"): {("run", "mode"): "sync", ("rollout", "interruption"): "abort_resume", _STALENESS: 0},
    ("run.mode", "sync"): {_STALENESS: 0},
    ("run.mode", "one_step_off"): {_STALENESS: 1, ("rollout", "interruption"): "drain"},
}
"""(Key, value) -> the keys that it sets."""


def _without_paths(value: Any) -> Any:
    """Return nested values without the paths."""
    if isinstance(value, dict):
        return {key: _without_paths(one) for key, one in value.items() if not isinstance(one, Path)}
    return [_without_paths(one) for one in value if not isinstance(one, Path)] if isinstance(value, list | tuple) else value


def _imply(section: Any, path: Sequence[str], implied: Any, key: str, because: str) -> Any:
    """Return `section` with the key at `path` set to `implied`; type validation reports a section that is not a mapping.

    Raises:
        ValueError: the section sets the key to another value.
    """
    if not isinstance(section, dict):
        return section
    name, *rest = path
    if rest:
        return {**section, name: _imply(section.get(name, {}), rest, implied, key, because)}
    if section.get(name, implied) != implied:
        raise refused(key, section[name], f"{implied} because {because}; leave either out")
    return {**section, name: implied}
