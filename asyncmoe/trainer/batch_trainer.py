"""Training on a leased batch: the log-probabilities the objective needs, the enabled checks, and the optimizer updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from asyncmoe.config import Config
from asyncmoe.flight.records import TrainedStep
from asyncmoe.models import shape_of
from asyncmoe.models.cost import attention_width
from asyncmoe.platform import collectives, megatron
from asyncmoe.rpc.messages import Leased, Phase
from asyncmoe.trainer.checks import BatchGuard, Guard, RecordedGuard
from asyncmoe.trainer.data import batch_client
from asyncmoe.trainer.data.batch_client import Fetch, Update
from asyncmoe.trainer.data.credit import outcome_advantages, relatives, token_advantages
from asyncmoe.trainer.data.microbatches import MicroBatches
from asyncmoe.trainer.data.schedule import Ranks
from asyncmoe.trainer.learned import Learned
from asyncmoe.trainer.losses import PolicyLoss, SupervisedLoss
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.trainer.model.lr import lr_at
from asyncmoe.trainer.model.reference import reference
from asyncmoe.trainer.model.replay import Replay
from asyncmoe.trainer.objective import Plugins
from asyncmoe.trainer.profiling import mark
from asyncmoe.trainer.samples import TrainerSamples
from asyncmoe.trainer.step import StepMetrics, logprobs_only, train_step
from asyncmoe.trainer.step_recorder import StepRecorder
from asyncmoe.trajectory import Trajectory

megatron.prepare()

from megatron.core.optimizer import MegatronOptimizer  # noqa: E402

LogProbs = dict[int, np.ndarray]
"""float32[T] by position in the batch."""
_NO_ADVANTAGE = np.zeros(1)

log = logging.getLogger(__name__)


class Learner:
    """Trains on batches. Every rank makes the same calls.

    Args:
        fetch: fetches trajectories.
        replay: replays recorded experts; None if routing is not kept.
        plugins: the user's own parts of the objective.
        samples: records values computed in training for some trajectories.
        recorder: watches the updates of reinforcement learning; None: nothing records them.

    Raises:
        DataError: the reference policy's checkpoint cannot be read.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        adam: MegatronOptimizer,
        fetch: Fetch,
        replay: Replay | None,
        plugins: Plugins,
        samples: TrainerSamples,
        recorder: StepRecorder | None = None,
    ) -> None:
        self._plugins, self._samples, self._recorder, self._skips = plugins, samples, recorder, 0
        self._config, self._model, self._optimizer, self._fetch, self._replay = config, model, adam, fetch, replay
        self._mesh, self._width = model.mesh, attention_width(shape_of(model.hf))
        self._reference = reference(model, config.model.path) if config.objective.kl.coefficient else None

    def learn(
        self, leased: Leased, phase: Phase, step: int, before_update: Callable[[], None], recorded: TrainedStep | None = None
    ) -> Learned:
        """Train on a batch.

        Args:
            step: the trainer's step, which is also its weight version.
            before_update: as for `train_step`.
            recorded: the record of an earlier training on the batch, whose micro-batches, if it has any, and refused updates are repeated.

        Raises:
            AnomalyFound: a rule of `verify` stops the run before an update.
        """
        updates, trajectories = self._fetched(leased, phase, () if recorded is None else recorded.schedule)
        if phase == "warmup":
            nothing, lr = dict.fromkeys(trajectories, _NO_ADVANTAGE), self._config.warmup.lr
            made = [batch_client.microbatches(update, trajectories, nothing, self._config, self._mesh) for update in updates]
            arguments = (SupervisedLoss(), lr, before_update, self._replay)
            return Learned([train_step(self._model, self._optimizer, batches, *arguments) for batches in made])
        akin = relatives(leased.items, sorted(trajectories), self._config.objective)
        others = batch_client.fetch(self._fetch, self._mesh, leased, akin, (), masks=False)
        verify = self._config.verify
        if leased.replayed and not (self._recorder and self._recorder.same):  # engines sampled with weights that are lost
            verify = verify.model_copy(update={"max_logprob_diff": None})
        rules = BatchGuard(verify, step + 1, self._skips, says=self._mesh.rank == 0)
        outcome = outcome_advantages(leased.items, self._config.objective, self._plugins)
        guard: Guard = rules if recorded is None else RecordedGuard(recorded.refused)
        guard = guard if self._recorder is None else self._recorder.watched(guard)
        metrics = self._reinforce(updates, trajectories, others, leased, step, before_update, guard, outcome)
        self._skips = self._skips + 1 if rules.refused else 0
        untrained = rules.skipped if all(update.refused for update in metrics) else ""
        found = {rule: one.value for rule, one in rules.found.items()}
        return Learned(metrics, found, untrained, tuple(update.schedule.ranks for update in updates), outcome[0])

    def scored(self, leased: Leased) -> LogProbs:
        """Return the log-probabilities of a batch's sampled tokens under the current weights, with the recorded experts and masks."""
        updates, trajectories = self._fetched(leased, "rl")
        nothing, routing = dict.fromkeys(trajectories, _NO_ADVANTAGE), None if self._replay is None else self._replay.routing

        def microbatches(update: Update) -> MicroBatches:
            return batch_client.microbatches(update, trajectories, nothing, self._config, self._mesh, routing)

        return self._scored(updates, microbatches, [item.tokens for item in leased.items])

    def _fetched(self, leased: Leased, phase: Phase, recorded: Sequence[Ranks] = ()) -> tuple[list[Update], dict[int, Trajectory]]:
        """Return a batch's updates, and the trajectories that this rank trains on, by position."""
        updates = batch_client.plan_updates(leased.items, phase, self._config, self._mesh, self._width, recorded)
        layers = () if self._replay is None else self._replay.layers
        with mark("fetch"):
            wanted = sorted(i for update in updates for i in update.schedule.indices(self._mesh.dp_rank))
            return updates, batch_client.fetch(self._fetch, self._mesh, leased, wanted, layers, self._mesh.last_stage)

    def _reinforce(
        self,
        updates: Sequence[Update],
        trajectories: Mapping[int, Trajectory],
        others: Mapping[int, Trajectory],
        leased: Leased,
        step: int,
        before_update: Callable[[], None],
        guard: Guard,
        outcome: tuple[np.ndarray, dict[str, float]],
    ) -> list[StepMetrics]:
        (paths, reported), config, mesh = outcome, self._config, self._mesh
        routing = None if self._replay is None else self._replay.routing
        advantages = token_advantages(leased.items, trajectories, config.objective, paths, others)
        lr = lr_at(step - config.warmup.steps, config.trainer.optimizer, config.run.steps)

        def microbatches(update: Update, before: LogProbs | None = None, reference: LogProbs | None = None) -> MicroBatches:
            return batch_client.microbatches(update, trajectories, advantages, config, mesh, routing, before, reference)

        lengths, objective = [item.tokens for item in leased.items], config.objective
        before = reference = None
        if len(updates) > 1 and objective.proximal == "recompute":
            before = self._scored(updates, microbatches, lengths)
        if self._reference is not None:
            # The reference is a separate policy: it chooses its own experts, and recorded supports do not restrict it.
            bare = {i: replace(one, routes=None, masks=None, top=None) for i, one in trajectories.items()}
            with self._reference():
                of_bare = partial(
                    batch_client.microbatches, trajectories=bare, advantages=dict.fromkeys(bare, _NO_ADVANTAGE), config=config, mesh=mesh
                )
                reference = self._scored(updates, of_bare, lengths)
        metrics, sampled = [], self._samples.of(leased.items)
        for i, update in enumerate(updates):
            loss = PolicyLoss(
                objective,
                config.rollout.temperature,
                step,
                progress=i / len(updates),
                plugins=self._plugins,
                observe=sampled.observe,
                over_ranks=partial(collectives.summed, group=mesh.cp_group) if mesh.cp > 1 else None,
            )
            made = microbatches(update, before, reference)
            found = train_step(self._model, self._optimizer, made, loss, lr, before_update, self._replay, sampled.count, guard)
            metrics.append(replace(found, figures={**found.figures, "plugin_metrics": reported | found.figures["plugin_metrics"]}))
            if not metrics[-1].updated and not metrics[-1].refused:
                log.warning("step %d: every token was rejected (%s); no update", step, metrics[-1].figures["rejected_by_rule"])
        self._samples.write(sampled, leased.items, trajectories, step)
        return metrics

    def _scored(self, updates: Sequence[Update], microbatches: Callable[[Update], MicroBatches], lengths: Sequence[int]) -> LogProbs:
        """Return the log-probabilities of sampled tokens. `lengths`: tokens of each trajectory of the batch."""
        temperature, scored = self._config.rollout.temperature, LogProbs()
        for update in updates:
            found = logprobs_only(self._model, microbatches(update), lengths, temperature, self._replay, sampled_only=True)
            scored |= {i: found[i] for i in update.members}
        return scored
