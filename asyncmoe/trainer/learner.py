"""What is done with a leased batch: log-probabilities as far as the objective wants them, the checks that are switched on, its updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.errors import Disagreement
from asyncmoe.platform import megatron
from asyncmoe.trainer import agreement, feed, objective, optimizer
from asyncmoe.trainer.agreement import Agreement
from asyncmoe.trainer.feed import Update
from asyncmoe.trainer.model import Model
from asyncmoe.trainer.replay import Replay
from asyncmoe.trainer.step import Loss, PolicyLoss, StepMetrics, SupervisedLoss, logprobs_only, train_step
from asyncmoe.trajectory import Trajectory
from asyncmoe.wire.client import Client
from asyncmoe.wire.messages import Leased, Phase

megatron.prepare()

from megatron.core.optimizer import MegatronOptimizer  # noqa: E402

log = logging.getLogger(__name__)


class Learner:
    """Trains on batches; the same calls on every rank.

    Args:
        client: fetches trajectories.
        replay: where routing is kept.
    """

    def __init__(self, config: Config, model: Model, adam: MegatronOptimizer, client: Client, replay: Replay | None) -> None:
        self._config, self._model, self._optimizer, self._client, self._replay = config, model, adam, client, replay
        self._mesh = model.mesh

    def learn(self, leased: Leased, phase: Phase, step: int, before_update: Callable[[], None]) -> list[StepMetrics]:
        """The updates made of a batch.

        Args:
            step: the trainer's, and its version.
            before_update: as for `train_step`.

        Raises:
            Disagreement: engine and trainer are further apart than `verify` allows; nothing was trained.
        """
        updates = feed.plan_updates(leased.items, phase, self._config, self._mesh)
        wanted = sorted({i for update in updates for i in feed.mine(update, self._mesh)})
        layers = () if self._replay is None else self._replay.layers
        trajectories = feed.fetch(self._client, leased, wanted, layers, masks=self._mesh.last_stage)
        if phase == "warmup":
            return self._warm_up(updates, trajectories, leased, before_update)
        return self._reinforce(updates, trajectories, leased, step, before_update)

    def _warm_up(
        self, updates: Sequence[Update], trajectories: Mapping[int, Trajectory], leased: Leased, before_update: Callable[[], None]
    ) -> list[StepMetrics]:
        config, advantages = self._config, np.zeros(len(leased.items), np.float32)
        made = [feed.microbatches(update, trajectories, advantages, config, self._mesh) for update in updates]
        return [train_step(self._model, self._optimizer, m, SupervisedLoss(), config.warmup.lr, before_update, self._replay) for m in made]

    def _reinforce(
        self,
        updates: Sequence[Update],
        trajectories: Mapping[int, Trajectory],
        leased: Leased,
        step: int,
        before_update: Callable[[], None],
    ) -> list[StepMetrics]:
        config, items, mesh = self._config, leased.items, self._mesh
        routing = None if self._replay is None else self._replay.routing
        advantages = objective.group_advantages([i.reward for i in items], [i.group for i in items], config.objective.advantage)
        loss: Loss = PolicyLoss(config.objective, config.rollout.temperature, version=step)
        lr = optimizer.lr_at(step - config.warmup.steps, config.trainer.optimizer, config.run.steps)
        verify = bool(config.verify.logprobs_every) and (step - config.warmup.steps) % config.verify.logprobs_every == 0
        recompute = len(updates) > 1 and config.objective.proximal == "recompute"
        before: dict[int, np.ndarray] | None = None
        if verify or recompute:
            before = {}
            for update in updates:
                made = feed.microbatches(update, trajectories, advantages, config, mesh, routing)
                lengths = [items[i].tokens for i in update.members]
                found = logprobs_only(self._model, made, lengths, config.rollout.temperature, self._replay)
                before |= {update.members[i]: values for i, values in found.items()}
        if verify and before is not None:
            self._verify(trajectories, before, step)
        proximal = before if recompute else None
        return [
            train_step(
                self._model,
                self._optimizer,
                feed.microbatches(update, trajectories, advantages, config, mesh, routing, proximal),
                loss,
                lr,
                before_update,
                self._replay,
            )
            for update in updates
        ]

    def _verify(self, trajectories: Mapping[int, Trajectory], ours: Mapping[int, np.ndarray], version: int) -> None:
        limits = self._config.verify
        mine = trajectories if self._mesh.reports else {}
        part = agreement.compare(list(mine.values()), [ours[i] for i in mine], version, limits.show)
        parts: list[Agreement] = [part] * self._mesh.world
        dist.all_gather_object(parts, part)
        whole = agreement.merge(parts, limits.show)
        if self._mesh.rank == 0:
            for line in agreement.describe(whole, version):
                log.info("%s", line)
        for what, got, limit in (("max_logprob_diff", whole.largest, limits.max_logprob_diff), ("max_kl", whole.kl, limits.max_kl)):
            if limit is not None and not got <= limit:
                raise Disagreement(
                    f"version {version}: engine and trainer differ by {got:.3e} over {whole.tokens} tokens, verify.{what} is {limit:g}; "
                    "nothing was trained on the batch. The log names the worst tokens"
                )
