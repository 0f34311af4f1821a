"""The result of training on a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncmoe.trainer.data.schedule import Ranks
from asyncmoe.trainer.step import StepMetrics


@dataclass(frozen=True)
class Learned:
    """The result of training on a batch.

    Attributes:
        updates: metrics of each optimizer update, refused ones included.
        anomalies: for each broken rule of `verify`, the value that broke it.
        untrained: the rules that refused every update, joined by commas; "" unless all updates were refused.
        schedule: the micro-batches of each update.
        advantages: float32[n]; the advantage of each trajectory's outcome; empty in the warm-up.
    """

    updates: Sequence[StepMetrics]
    anomalies: Mapping[str, float] = field(default_factory=dict)
    untrained: str = ""
    schedule: tuple[Ranks, ...] = ()
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
