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
    """A tensor that differs between a checkpoint and the weights trained from the records.

    Attributes:
        tensor: its name, as in `Started.tensors`.
        elements: number of elements that differ.
        first, last: row-major indices of the first and the last of them in the whole tensor.
        largest: largest absolute difference.
        scale: largest magnitude in the checkpoint.
    """

    tensor: str
    elements: int
    first: int
    last: int
    largest: float
    scale: float


class Compared(msgspec.Struct, frozen=True):
    """Differences of the weights after `step` steps, in the order of the forward pass."""

    step: int
    tensors: tuple[TensorDifference, ...]
