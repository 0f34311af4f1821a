"""A stretch of recorded steps that is trained again with one configuration: written by the command, read by its ranks."""

from __future__ import annotations

import msgspec

DIFFERENCES = "differences.jsonl"
"""Below the directory of a replay: a `Compared` for each step of which the recorded run has a checkpoint, if the weights differ."""


class Stage(msgspec.Struct, frozen=True):
    """Attributes:
    source: directory of the recorded run.
    checkpoint: directory of the checkpoint to begin with; "": the model's files.
    last: steps taken at the end.
    replays: repeat the recorded micro-batches and the decisions of `verify`; else the configuration decides.
    saves: save a checkpoint at the end.
    """

    source: str
    checkpoint: str
    last: int
    replays: bool
    saves: bool


class TensorDifference(msgspec.Struct, frozen=True):
    """How a tensor of the weights differs from a checkpoint's.

    Attributes:
        name: as in `Started.tensors`.
        elements: number of elements whose bits differ.
        first, last: row-major index of the first and of the last of these.
        largest: largest absolute difference; infinite if it is not a number.
        magnitude: largest magnitude in the checkpoint's tensor.
    """

    name: str
    elements: int
    first: int
    last: int
    largest: float
    magnitude: float


class Compared(msgspec.Struct, frozen=True):
    """Differences of the weights after `step` steps, in the order of the forward pass."""

    step: int
    tensors: tuple[TensorDifference, ...]
