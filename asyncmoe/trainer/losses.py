"""Losses over the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.trainer import objective
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.objective import NO_PLUGINS, Fates, Plugins, Sums, centring


@dataclass(frozen=True)
class PolicyLoss:
    """The reinforcement-learning objective of the configuration.

    Attributes:
        temperature: divides the logits.
        version: weight version before the batch's first update.
        progress: share of the batch's updates already made.
        plugins: the user's own parts that `section` names.
        observe: called with each micro-batch and its rows' fates.
        over_ranks: as `objective.Rows.over_ranks`.
    """

    section: ObjectiveSection
    temperature: float
    version: int
    progress: float = 0.0
    plugins: Plugins = NO_PLUGINS
    observe: Callable[[MicroBatch, Fates], None] | None = None
    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def sums(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the sums that a call returns, the same for every micro-batch; they include the inputs of
        `objective.scale`."""
        found = dict(objective.SUMS) | dict.fromkeys(centring.SUMS if self.section.score_centering else (), ())
        for plugin in self.plugins.of_tokens:
            found |= plugin.sums
        return found

    def figures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return `objective.metrics` of the step's sums, and in `plugin_metrics` the plug-ins' metrics and score centring's, averaged over
        sampled tokens."""
        centre = {name: float(sums[name]) / max(float(sums["tokens"]), 1.0) for name in centring.SUMS if name in sums}
        found: dict[str, Any] = objective.metrics(sums) | {"plugin_metrics": centre}
        for plugin in self.plugins.of_tokens:
            means, rejected = plugin.figures(sums)
            found["plugin_metrics"] |= means
            found["rejected_by_rule"] |= {plugin.short: rejected} if rejected else {}
        return found

    def checked(self, figures: Mapping[str, Any]) -> dict[str, float]:
        """Return the step's figures that a `checks.Guard` looks at. After the batch's first update, the trainer's weights are no longer the
        version that sampled the newest tokens, so "logprob_diff" is left out."""
        apart = figures["logprob_diff_max_same_version"]
        same = {} if self.progress or apart is None else {"logprob_diff": apart}
        return {"kl_engine": figures["train_infer_kl"], **same}

    def check(self, sums: Mapping[str, Any]) -> None:
        """Refuse a step in which a plug-in returned wrong values.

        Raises:
            InvariantBroken: the same on every rank.
        """
        for plugin in self.plugins.of_tokens:
            plugin.check(sums)

    @property
    def wants_unmasked(self) -> bool:
        """Whether the loss also needs log-probabilities over the whole vocabulary for rows with a support."""
        return self.section.kl.coefficient > 0

    def __call__(
        self, logprobs: torch.Tensor, batch: MicroBatch, unmasked: torch.Tensor | None, top: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Sums]:
        """Return the micro-batch's share of the step's loss, weighted by `MicroBatch.weights`, and its sums.

        Args:
            logprobs: float32[T] with gradient, over the supports of `batch`.
            unmasked: float32[T] with gradient, over the whole vocabulary; None: use `logprobs`.
            top: float32[T, K] with gradient, of `MicroBatch.top_ids`; None: there are none.
        """
        rows = objective.Rows(
            mask=batch.mask,
            weights=batch.weights,
            advantages=batch.advantages,
            behaviour=batch.behaviour,
            versions=batch.versions,
            pure=batch.pure,
            segments=batch.segments,
            sequences=len(batch.places),
            over_ranks=self.over_ranks,
            proximal=batch.proximal,
            reference=batch.reference,
        )
        return objective.policy_loss(
            logprobs,
            rows,
            self.section,
            self.version,
            progress=self.progress,
            unmasked=unmasked,
            top=None if top is None or batch.top_logprobs is None else (top, batch.top_logprobs.t()),
            plugins=self.plugins,
            observe=None if self.observe is None else partial(self.observe, batch),
        )


@dataclass(frozen=True)
class SupervisedLoss:
    """Negative log-likelihood of demonstrations. Same members as `PolicyLoss`."""

    temperature: float = 1.0
    sums: ClassVar[Mapping[str, tuple[int, ...]]] = {"tokens": (), "kept": (), "planned_weight": (), "kept_weight": ()}
    wants_unmasked: ClassVar[bool] = False

    def __call__(
        self, logprobs: torch.Tensor, batch: MicroBatch, unmasked: torch.Tensor | None, top: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Sums]:
        """Return the micro-batch's share of the step's loss, weighted by `MicroBatch.weights`, and the sums that `objective.scale` needs;
        no token is ever rejected."""
        loss = -(torch.where(batch.mask, logprobs, 0.0) * batch.weights).sum()
        tokens, planned = batch.mask.sum().double(), torch.where(batch.mask, batch.weights, 0.0).double().sum()
        return loss, {"tokens": tokens, "kept": tokens, "planned_weight": planned, "kept_weight": planned}


Loss = PolicyLoss | SupervisedLoss
