"""Advantages and losses: pure functions over flat arrays.

    advantage (`advantages`)  x  clipped ratio to a policy (`surrogate`)  x  correction (`correction`)  +  KL (`surrogate`)

Step rewards and a teacher give single tokens their own advantages (`token_advantages`). The configuration
(`asyncmoe.config.objective`) selects each part; `policy_loss` combines them. A loss is a weighted sum over rows. Row weights
(`aggregation`) are planned for the whole step before any forward pass, so losses, gradients and figures (`metrics`) do not depend on how
rows are distributed over micro-batches and ranks. A user's own advantage, loss or importance weight (`plugin`, `trial`) takes the place of
`advantages`, of the clipped ratio, or of the weight in `correction`.
"""

from asyncmoe.trainer.objective.advantages import group_advantages
from asyncmoe.trainer.objective.aggregation import scale, token_weights
from asyncmoe.trainer.objective.correction import RULES, Fates
from asyncmoe.trainer.objective.loss import policy_loss
from asyncmoe.trainer.objective.metrics import AGES, SUMS, metrics
from asyncmoe.trainer.objective.plugin import NO_PLUGINS, Plugins, Responses
from asyncmoe.trainer.objective.rows import PolicyRows, Rows, Sums, exp, segments
from asyncmoe.trainer.objective.token_advantages import distill_advantages, process_advantages, step_scales
from asyncmoe.trainer.objective.trial import load

__all__ = [
    "AGES",
    "NO_PLUGINS",
    "RULES",
    "SUMS",
    "Fates",
    "Plugins",
    "PolicyRows",
    "Responses",
    "Rows",
    "Sums",
    "distill_advantages",
    "exp",
    "group_advantages",
    "load",
    "metrics",
    "policy_loss",
    "process_advantages",
    "scale",
    "segments",
    "step_scales",
    "token_weights",
]
