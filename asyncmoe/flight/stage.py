"""A stretch of recorded steps that is trained again with one configuration: written by the command, read by its ranks."""

from __future__ import annotations

import msgspec

from asyncmoe.flight.agreement import StaleTokens

FINDINGS = "findings.jsonl"
"""In the directory of a replay: a `StepFinding` for each step with one."""


class Stage(msgspec.Struct, frozen=True):
    """Attributes:
    source: directory of the recorded run.
    checkpoint: directory of the checkpoint to begin with; "": the model's files.
    last: steps taken at the end.
    replays: repeat the recorded micro-batches and the decisions of `verify`; else the configuration decides.
    saves: save a checkpoint at the end.
    tokens: look for tokens that fit another version than theirs (`asyncmoe.flight.agreement`).
    """

    source: str
    checkpoint: str
    last: int
    replays: bool
    saves: bool
    tokens: bool = False


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


class StepFinding(msgspec.Struct, frozen=True):
    """What a replay found at a step.

    Attributes:
        tensors: those that differ from the checkpoint that the recorded run has of this step, in the order of the forward pass.
        stale: tokens of the step's batch that fit the version before theirs.
    """

    step: int
    tensors: tuple[TensorDifference, ...] = ()
    stale: tuple[StaleTokens, ...] = ()
