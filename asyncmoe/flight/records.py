"""Records of trained steps, in RUN/trained.jsonl: rank 0 of the trainer writes a line when it starts, and one after each step.

A trainer that returns to a checkpoint trains its steps again and writes new lines for them; the newest line of a step counts. With the
run's log, which holds the batches, and a checkpoint, the lines suffice to train the steps again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncmoe.errors import DataError
from asyncmoe.telemetry.records import Tail, decoded

log = logging.getLogger(__name__)
TRAINED = "trained.jsonl"


class Started(msgspec.Struct, frozen=True):
    """A start of the trainer. The following steps, up to the next start, were trained under it.

    Attributes:
        started_at: steps taken before.
        config: the configuration, as `Config.model_dump(mode="json")` returns it.
        circumstances: what, besides the record, the bits of a step depend on, by name (`asyncmoe.flight.circumstances`).
        tensors: the names of the digests in `TrainedStep`, in the order of the forward pass.
        deterministic: whether the same record gives the same bits (`run.deterministic`).
    """

    started_at: int
    config: dict[str, Any]
    circumstances: dict[str, str]
    tensors: tuple[str, ...]
    deterministic: bool

    @property
    def sizes(self) -> dict[str, str]:
        """The parallel sizes, which the micro-batches depend on."""
        return {name: value for name, value in self.circumstances.items() if name.startswith("trainer.")}


class TrainedStep(msgspec.Struct, frozen=True):
    """A step of reinforcement learning. Warm-up steps have no record.

    Digests are arrays of little-endian uint64, one for each of `Started.tensors`, or empty unless the trainer is deterministic. They do not
    depend on the parallel layout (`asyncmoe.trainer.model.digests`).

    Attributes:
        step: steps taken, this one included, as in metrics.jsonl. The step trained the lease of number `step - 1`.
        items: digest of the leased trajectories' metadata, 16 hexadecimal digits (`digest_of`).
        schedule: for each optimizer update, the micro-batches of each data-parallel rank: positions in the batch.
        refused: for each update, whether `verify` refused it.
        advantages: float32[n], little-endian: the advantage of each trajectory's outcome, in the order of the batch.
        lr: learning rate.
        loss, grad_norm: of each update.
        gradient: digests of each update's gradients, after reduction over ranks and before clipping; empty if it was refused.
        weights, optimizer: digests of the state after the step; `optimizer` covers float32 masters and Adam's averages.
    """

    step: int
    items: str
    schedule: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    refused: tuple[bool, ...]
    advantages: bytes
    lr: float
    loss: tuple[float | None, ...]
    grad_norm: tuple[float | None, ...]
    gradient: tuple[bytes, ...]
    weights: bytes
    optimizer: bytes


@dataclass(frozen=True)
class StepRecords:
    """The records of a run.

    Attributes:
        steps: the newest record of each step, by `TrainedStep.step`.
        starts: the start under which it was trained, by the same number.
        newest: the newest start.
    """

    steps: Mapping[int, TrainedStep]
    starts: Mapping[int, Started]
    newest: Started | None = None


def read(run_dir: Path) -> StepRecords:
    """Read the records of a run. An incomplete last line is ignored; a step whose line is damaged has no record.

    Raises:
        DataError: the run has no records.
    """
    if not (path := run_dir / TRAINED).is_file():
        got, hint = f"{run_dir}, which has no {TRAINED}", "runs of older versions have no records"
        raise DataError("RUN", got=got, expected="a run that records its trained steps", hint=hint)
    steps: dict[int, TrainedStep] = {}
    starts: dict[int, Started] = {}
    start: Started | None = None
    for where, line in Tail(path).lines():
        try:
            if b'"started_at"' in line:
                before, start = start, decoded(where, line, Started)
                again = before and (before.config, before.circumstances) == (start.config, start.circumstances)
                if not (start.deterministic and again):
                    steps = {step: one for step, one in steps.items() if step <= start.started_at}  # the weights of later ones are lost
            elif start is not None:
                step = decoded(where, line, TrainedStep)
                steps[step.step], starts[step.step] = step, start
        except DataError as error:
            log.warning("%s", error)
    return StepRecords(steps, starts, start)
