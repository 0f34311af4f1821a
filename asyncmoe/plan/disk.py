"""The disk space that a run takes: the batches in its log, and its checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from asyncmoe.checkpoints import Retention
from asyncmoe.config import Config
from asyncmoe.models import adapter_of, recording
from asyncmoe.models.payload import Payload
from asyncmoe.plan.budget import conversation
from asyncmoe.plan.memory import Hf
from asyncmoe.trajectory import Recording
from asyncmoe.trajectory.trajectory import ARRAYS, OPTIONAL, TOP

_OPTIMIZER_BYTES = 12
"""Optimizer bytes per parameter: Adam's two moments and the master weight, in float32."""


@dataclass(frozen=True)
class Disk:
    """Upper bounds in bytes, and counts at the end of a run.

    Attributes:
        token: of a sampled token in the log.
        step: of a step's batch, if every conversation has the greatest length.
        steps: steps whose batches are in the log when the last checkpoint is saved.
        checkpoint: of a checkpoint.
        checkpoints: number of checkpoints kept.
    """

    token: int
    step: int
    steps: int
    checkpoint: int
    checkpoints: int


def of_run(config: Config, hf: Hf) -> Disk:
    """Return what a run keeps on disk. Raises as `asyncmoe.models.recording`."""
    asked, first, every = Retention.of(config), config.warmup.steps, config.checkpoint_every
    total, begin, left = first + config.run.steps, first, set[int]()
    for saved in sorted({first, total, *(range(every, total, every) if every else ())} - {0}):
        recorded, left = saved - begin, asked.kept(left | {saved}, begin)
        begin = asked.begins(left, begin) or first
    token = token_bytes(recording(config, hf), config.rollout.top_k or 0)
    step = config.rollout.batch * conversation(config, hf) * token
    return Disk(token, step, recorded, checkpoint_bytes(config, hf), len(left))


def token_bytes(asked: Recording, top_k: int) -> int:
    """Return the bytes of a sampled token in a payload (`asyncmoe.trajectory.codec`), rounded up. `top_k`: the largest sampling mask."""
    arrays = [*ARRAYS.values(), *(OPTIONAL[name] for name in OPTIONAL if getattr(asked, name))]
    bits = 8 * (sum(np.dtype(one).itemsize for one in arrays) + asked.top * TOP.itemsize)
    if asked.routing is not None:
        bits += len(asked.routing.layers) * asked.routing.top_k * (asked.routing.experts - 1).bit_length()
    if asked.masks:
        bits += 32 + top_k * ((asked.vocabulary or 1) - 1).bit_length()
    return math.ceil(bits / 8)


def checkpoint_bytes(config: Config, hf: Hf) -> int:
    """Return an upper bound for the bytes of a checkpoint."""
    weights = 4 if config.trainer.weights_dtype == "float32" else 2
    return sum(map(math.prod, Payload(hf, adapter_of(config, hf)).tensors().values())) * (weights + _OPTIMIZER_BYTES)
