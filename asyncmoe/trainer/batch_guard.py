"""Applies `verify.anomalies` to each batch: asks the rules, logs what they find, and keeps evidence before the run stops."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from asyncmoe.config import Config
from asyncmoe.errors import AnomalyFound, InvariantBroken
from asyncmoe.platform import collectives
from asyncmoe.rpc.item import Item
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.schema import METRICS
from asyncmoe.trainer import anomalies, evidence
from asyncmoe.trainer.anomalies import Anomaly, History
from asyncmoe.trainer.data import trees
from asyncmoe.trajectory import Trajectory

if TYPE_CHECKING:  # imports Megatron
    from asyncmoe.trainer.model.mesh import Mesh

log = logging.getLogger(__name__)


class UpdateGuard(Protocol):
    """Decides whether an optimizer step is taken. Every rank passes the same values and gets the same answers."""

    def loss(self, loss: float, figures: Mapping[str, Any]) -> bool:
        """Whether to go on after the backward pass. `figures`: as in `StepMetrics`."""

    def gradients(self, norm: float) -> bool:
        """Whether to change parameters; `norm`: of the gradients before clipping, NaN if it is not finite on some rank."""


class FiniteOnly:
    """The guard of updates without rules: what is not finite is a broken invariant."""

    def loss(self, loss: float, figures: Mapping[str, Any]) -> bool:
        if not math.isfinite(loss):
            raise InvariantBroken(f"the loss is {loss}; no parameter was changed")
        return True

    def gradients(self, norm: float) -> bool:
        if not math.isfinite(norm):
            raise InvariantBroken(f"the gradient norm is {norm}; no parameter was changed")
        return True


class BatchGuard:
    """The guard of one RL batch's updates. Once it refuses one, it refuses the rest of the batch.

    Attributes:
        found: the broken rules, each once.

    Raises:
        AnomalyFound: a rule stops the run. The same on every rank, after the evidence is written.
    """

    def __init__(self, watch: AnomalyWatch, items: Sequence[Item], trajectories: Mapping[int, Trajectory], step: int) -> None:
        self._watch, self._items, self._trajectories, self._step = watch, items, trajectories, step
        rewards = trees.rewards(items)
        sampled = [item.oldest_version for item in items if item.oldest_version >= 0]
        age = float(step - min(sampled, default=step))
        self._values = {"age": age, "reward": float(rewards.mean()), "reward_std": float(rewards.std())}
        self.found: dict[str, Anomaly] = {}
        self._refused = False

    @property
    def skipped(self) -> str:
        """Why the batch is left untrained: the rules that refused it; "" if none did."""
        return ",".join(sorted(rule for rule, one in self.found.items() if one.action != "warn")) if self._refused else ""

    def loss(self, loss: float, figures: Mapping[str, Any]) -> bool:
        return self._allows({"loss": loss, "kl_engine": float(figures.get("train_infer_kl", 0.0))})

    def gradients(self, norm: float) -> bool:
        return self._allows({"grad_norm": norm})

    def end(self) -> None:
        """Remember the batch's values for the next."""
        self._watch.remember(self._values, self._refused)

    def _allows(self, values: Mapping[str, float]) -> bool:
        self._values.update(values)
        rules, history = self._watch.rules, self._watch.history
        findings = anomalies.judge(rules, self._values, history)
        for one in findings:
            if one.rule not in self.found:
                self.found[one.rule] = one
                self._watch.say(f"step {self._step + 1}: {one.why} ({one.action})")
        decision = anomalies.verdict(findings, history, rules)
        if decision == "stop":
            self._watch.stop(self._step + 1, self._items, self._trajectories, findings, self._values)
        self._refused = self._refused or decision == "skip"
        return not self._refused


class AnomalyWatch:
    """The rules of a run, and what they remember. Construct it on every rank at the same time."""

    def __init__(self, config: Config, place: Mesh, done: int) -> None:
        self._config, self._mesh, self.rules = config, place, config.verify.anomalies
        mine = _recorded(config, done) if place.rank == 0 else History()
        self.history = collectives.everyones(mine)[0]

    def batch(self, items: Sequence[Item], trajectories: Mapping[int, Trajectory], step: int) -> BatchGuard:
        """Return the guard of the batch of step `step`; `trajectories`: those this rank trains on, by position in the batch."""
        return BatchGuard(self, items, trajectories, step)

    def remember(self, values: Mapping[str, float], skipped: bool) -> None:
        kept = {name: value for name, value in values.items() if name not in ("loss", "age")}
        self.history = self.history.then(kept, skipped, self.rules.window)

    def say(self, text: str) -> None:
        """Log it, once for all ranks."""
        if self._mesh.rank == 0:
            log.warning("anomaly: %s", text)

    def stop(
        self, step: int, items: Sequence[Item], mine: Mapping[int, Trajectory], findings: Sequence[Anomaly], values: Mapping[str, float]
    ) -> None:
        """Write the evidence, on all ranks.

        Raises:
            AnomalyFound: always, when all ranks have written.
            StorageError: this rank's part cannot be written.
        """
        if self._mesh.rank == 0:
            evidence.write_facts(self._config, step, items, findings, values, self.history)
        if self._mesh.reports_trajectories:  # of the ranks that hold a trajectory, one writes it
            evidence.write_arrays(self._config.run.dir, step, self._mesh.rank, mine)
        collectives.barrier()  # the first rank that ends has the others ended
        why = "; ".join(one.why for one in findings)
        after = f" after {self.history.skips} skipped batches" if all(one.action != "stop" for one in findings) else ""
        kept = evidence.folder(self._config.run.dir, step)
        raise AnomalyFound(f"step {step}: {why} (verify.anomalies){after}; no parameter was changed, and the evidence is in {kept}")


def _recorded(config: Config, done: int) -> History:
    steps = [step for step in read_steps(config.run.dir / METRICS) if step.phase == "rl" and step.step <= done]
    return anomalies.history_of(steps, config.verify.anomalies.window)
