"""Advantages and losses: pure functions over flat arrays.

    advantage (`advantages`)  x  ratio (`ratio`) to a policy (`proximal`)  x  clip (`clip`)  x  correction (`correction`)  +  KL (`kl`)

with advantages of single tokens where steps are rewarded (`process`) or a teacher is asked (`distill`); each chosen in the configuration
(`asyncmoe.config.objective`), put together by `policy_loss`. A loss is a weighted sum over rows; what a row counts for (`aggregation`) is
planned for the whole step before any forward pass, so losses, gradients and figures (`metrics`) do not depend on how rows are dealt to
micro-batches and ranks.
"""

from asyncmoe.trainer.objective.advantages import group_advantages
from asyncmoe.trainer.objective.aggregation import scale, token_weights
from asyncmoe.trainer.objective.distill import distill_advantages
from asyncmoe.trainer.objective.loss import policy_loss, supervised_loss
from asyncmoe.trainer.objective.metrics import AGES, SUMS, metrics
from asyncmoe.trainer.objective.process import process_advantages, step_scales
from asyncmoe.trainer.objective.rows import Rows, Sums, segments

__all__ = [
    "AGES",
    "SUMS",
    "Rows",
    "Sums",
    "distill_advantages",
    "group_advantages",
    "metrics",
    "policy_loss",
    "process_advantages",
    "scale",
    "segments",
    "step_scales",
    "supervised_loss",
    "token_weights",
]
