"""The trainer's half of samples: its values for each token of the kept groups (`asyncmoe.telemetry.samples`).

Every rank knows from a lease which trajectories are kept and how many tokens they have, and so the position of each value in one array.
During training each rank keeps references to the values it computes: log-probabilities and fates on the last pipeline stage, the routers'
disagreement on every stage. After the step the ranks sum their arrays, which are zero where other ranks have values, and rank 0 writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncmoe.config import Config
from asyncmoe.platform import collectives
from asyncmoe.rpc.item import Item
from asyncmoe.telemetry.samples import records
from asyncmoe.telemetry.samples.choice import choice_of, ends, kept
from asyncmoe.telemetry.samples.file import SampleFile
from asyncmoe.telemetry.samples.records import Trained
from asyncmoe.trainer.data.batch import MicroBatch, Place
from asyncmoe.trainer.objective import RULES, Fates
from asyncmoe.trajectory import Trajectory

if TYPE_CHECKING:  # imports Megatron
    from asyncmoe.trainer.model.mesh import Mesh

_FIELDS = ("logprobs", "weights", "advantages", "states", "mismatch")
_RULES = {rule: letter for letter, rule in records.REJECTED.items()}
_STATES = (records.TRAINED, records.CLIPPED, records.CAPPED, records.NO_WEIGHT, *(_RULES[rule] for rule in RULES))
_Kept = list[tuple[int, int]]
"""Positions in the batch, and first rows, of the kept trajectories of a micro-batch."""
_MISMATCH = len(_FIELDS) - 1
"""Number of fields that come from the loss; the last field comes from the routers."""


@dataclass(frozen=True)
class _Block:
    """Where the values of a trajectory lie in the array: its digest, then `_FIELDS` of the first `head` and last `tail` sampled tokens."""

    start: int
    head: int
    tail: int

    @property
    def count(self) -> int:
        return self.head + self.tail

    @property
    def end(self) -> int:
        return self.start + 1 + len(_FIELDS) * self.count


class BatchSamples:
    """Collects, on one rank, the values of a batch's kept trajectories.

    Args:
        items: the whole batch.
        wanted: positions in the batch of the kept trajectories.
        most: as `records.MOST_TOKENS`.
        reports: whether this rank's fates count (`Mesh.reports`).
    """

    def __init__(self, items: Sequence[Item], wanted: Sequence[int], most: int, reports: bool) -> None:
        self._reports = reports
        self.blocks: dict[int, _Block] = {}
        start = 0
        for i in wanted:
            self.blocks[i] = _Block(start, *kept(items[i].sampled, most))
            start = self.blocks[i].end
        self._size = start
        self._seen: list[tuple[_Kept, MicroBatch, Fates]] = []
        self._differs: dict[tuple[Place, ...], tuple[_Kept, MicroBatch, torch.Tensor]] = {}

    def observe(self, batch: MicroBatch, fates: Fates) -> None:
        """Record the fates of a micro-batch."""
        if self._reports and (found := self._in(batch)):
            self._seen.append((found, _light(batch), fates))

    def count(self, batch: MicroBatch) -> torch.Tensor | None:
        """Return int32[T] for a micro-batch, to which routers add 1 in the rows they disagree on; None: not needed."""
        if not (found := self._in(batch)):
            return None
        if batch.places not in self._differs:
            self._differs[batch.places] = found, _light(batch), torch.zeros(batch.rows, dtype=torch.int32, device=batch.tokens.device)
        return self._differs[batch.places][2]

    def values(self, trajectories: Mapping[int, Trajectory]) -> torch.Tensor:
        """Return this rank's part of the array: float64, zero where another rank has the value.

        Args:
            trajectories: those this rank has fetched, by position in the batch.
        """
        flat = np.zeros(self._size)
        for found, batch, fates in self._seen:
            each = torch.stack([fates.logprobs, fates.weight, batch.advantages, _states(fates).float()], dim=1)
            values = batch.everywhere(each).cpu().numpy()
            for i, first in found:
                block = self.blocks[i]
                if batch.held is None or (batch.held == first).any():
                    flat[block.start] = records.digest_of(trajectories[i].tokens, trajectories[i].logprobs)
                of = flat[block.start + 1 : block.start + 1 + _MISMATCH * block.count].reshape(_MISMATCH, block.count)
                of[:] = values[_rows(trajectories[i], first, block)].T
        for found, batch, differs in self._differs.values():
            counts = batch.everywhere(differs).cpu().numpy()
            for i, first in found:
                block = self.blocks[i]
                flat[block.end - block.count : block.end] = counts[_rows(trajectories[i], first, block)]
        return torch.from_numpy(flat)

    def _in(self, batch: MicroBatch) -> _Kept:
        return [(i, first) for i, first, _ in batch.places if i in self.blocks]


def _light(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch to keep until the step ends, without its recordings, which are large."""
    return replace(batch, experts=None, support=None, top_ids=None, top_logprobs=None)


def _rows(trajectory: Trajectory, first: int, block: _Block) -> np.ndarray:
    """Return the rows of a trajectory's kept tokens; the data of a token are in the row before it. `first`: its first row."""
    return first + ends(trajectory.loss_mask.nonzero()[0], block.head, block.tail) - 1


class TrainerSamples:
    """The samples of a run, on one rank. Every rank makes the same calls.

    Args:
        done: optimizer steps taken so far.
        layers: number of layers whose routing is kept.
    """

    def __init__(self, config: Config, mesh: Mesh, done: int, layers: int) -> None:
        self._mesh, self._layers, self._choice = mesh, layers, choice_of(config)
        write = mesh.rank == 0 and config.telemetry.samples.groups > 0
        self._file = SampleFile(config.run.dir, records.TRAINER_SAMPLES, records.MOST_BYTES, done) if write else None

    def of(self, items: Sequence[Item]) -> BatchSamples:
        """Return a collector for a batch's kept groups."""
        wanted = [i for i, item in enumerate(items) if self._choice.takes(item.group)]
        return BatchSamples(items, wanted, records.MOST_TOKENS, self._mesh.reports)

    def write(self, batch: BatchSamples, items: Sequence[Item], trajectories: Mapping[int, Trajectory], version: int) -> None:
        """Add up the ranks' values of a trained batch and write them. Collective over all ranks.

        Args:
            version: the trainer's weight version before the step.
        """
        if not batch.blocks:
            return
        values = collectives.total(batch.values(trajectories))
        if self._file is None or not self._file.is_open:
            return
        listed, now = records.rounded(values.cpu().numpy()), time.time()
        self._file.write(
            *(self._record(items[i], listed[block.start : block.end], block, version, now) for i, block in batch.blocks.items())
        )

    def _record(self, item: Item, values: list[float], block: _Block, version: int, now: float) -> Trained:
        found = {name: values[1 + i * block.count : 1 + (i + 1) * block.count] for i, name in enumerate(_FIELDS)}
        return Trained(
            time=now,
            step=version + 1,
            version=version,
            key=item.key,
            digest=int(values[0]),
            logprobs=found["logprobs"],
            advantages=_one_or_all(found["advantages"]),
            weights=_one_or_all(found["weights"]),
            states="".join(map(_STATES.__getitem__, map(int, found["states"]))),
            mismatch=[*map(int, found["mismatch"])] if self._layers else [],
            layers=self._layers,
        )


def _states(fates: Fates) -> torch.Tensor:
    """Return the index in `_STATES` of each row: int64[T]."""
    first = fates.rejected.int().argmax(dim=0) + len(_STATES) - len(RULES)
    unkept = torch.where(fates.rejected.any(dim=0), first, _STATES.index(records.NO_WEIGHT))
    used = torch.where(fates.cut, _STATES.index(records.CLIPPED), torch.where(fates.capped, _STATES.index(records.CAPPED), 0))
    return torch.where(fates.kept, used, unkept)


def _one_or_all(values: list[float]) -> float | list[float]:
    """Return a list's value if all are equal and finite, else the list."""
    return values[0] if values and math.isfinite(values[0]) and values.count(values[0]) == len(values) else values
