"""What a step minimises, over the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.trainer import objective
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.objective import Sums

_DENOMINATOR: Mapping[str, tuple[int, ...]] = {"tokens": (), "kept": (), "planned_weight": (), "kept_weight": ()}


class Loss(Protocol):
    """What a step minimises."""

    @property
    def temperature(self) -> float:
        """Logits are divided by it."""

    @property
    def sums(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the sums it returns, the same for every micro-batch; those that `objective.scale` needs are among them."""

    @property
    def wants_unmasked(self) -> bool:
        """It looks at log-probabilities over the whole vocabulary too, where rows have a support."""

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch, unmasked: torch.Tensor | None) -> tuple[torch.Tensor, Sums]:
        """The micro-batch's share of the step's loss (`MicroBatch.weights` make it so), and its sums.

        Args:
            logprobs: float32[T] with gradient, over the supports of `batch`.
            unmasked: float32[T] with gradient, over the whole vocabulary; None: `logprobs` is.
        """


@dataclass(frozen=True)
class PolicyLoss:
    """The reinforcement-learning objective of the configuration.

    Attributes:
        version: of the weights before the batch's first update.
        progress: updates made to the batch so far, as a share of those it gets.
    """

    section: ObjectiveSection
    temperature: float
    version: int
    progress: float = 0.0

    @property
    def sums(self) -> Mapping[str, tuple[int, ...]]:
        return objective.SUMS

    @property
    def wants_unmasked(self) -> bool:
        return self.section.kl.coefficient > 0

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch, unmasked: torch.Tensor | None) -> tuple[torch.Tensor, Sums]:
        rows = objective.Rows(
            mask=batch.mask,
            weights=batch.weights,
            advantages=batch.advantages,
            behaviour=batch.behaviour,
            versions=batch.versions,
            pure=batch.pure,
            segments=objective.segments([count for _, _, count in batch.places], batch.rows).to(logprobs.device),
            sequences=len(batch.places),
            proximal=batch.proximal,
            reference=batch.reference,
        )
        return objective.policy_loss(logprobs, rows, self.section, self.version, progress=self.progress, unmasked=unmasked)


@dataclass(frozen=True)
class SupervisedLoss:
    """Negative log-likelihood of demonstrations."""

    temperature: float = 1.0

    @property
    def sums(self) -> Mapping[str, tuple[int, ...]]:
        return _DENOMINATOR

    @property
    def wants_unmasked(self) -> bool:
        return False

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch, unmasked: torch.Tensor | None) -> tuple[torch.Tensor, Sums]:
        return objective.supervised_loss(logprobs, batch.mask, batch.weights)
