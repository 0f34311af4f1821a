"""The trainer's half of samples: what it made of each token of the kept groups (`asyncmoe.telemetry.samples`).

Every rank knows from a lease which trajectories are kept and how many tokens they have, and so the place of each value in one array. During
training each rank keeps references to the values it computes: log-probabilities and fates on the last pipeline stage, the routers'
disagreement on every stage. After the step the ranks add up their arrays, in which all other ranks' values are zero, and rank 0 writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.objective import RULES, Fates
from asyncmoe.trajectory import Trajectory

if TYPE_CHECKING:  # imports Megatron
    from asyncmoe.trainer.model.mesh import Mesh

_FIELDS = ("logprobs", "proximal", "weights", "advantages", "states", "mismatch")
_RULES = {rule: letter for letter, rule in records.REJECTED.items()}
_STATES = (records.TRAINED, records.CLIPPED, records.CAPPED, records.NO_WEIGHT, *(_RULES[rule] for rule in RULES))
_MISMATCH = len(_FIELDS) - 1
"""Number of fields that the loss gives; the last field is the routers'."""
_Places = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Rows:
    """The parts of a micro-batch that are kept until the step ends; its experts are large.

    Attributes:
        positions: position in the batch and first row and row count of each trajectory.
        whole: number of rows of all context-parallel ranks together.
        held: int64[T]; which of them this rank holds; None: all.
    """

    positions: _Places
    whole: int
    held: torch.Tensor | None

    @classmethod
    def of(cls, members: Sequence[int], batch: MicroBatch) -> _Rows:
        """Return those of a micro-batch of an update; `members`: as `Update.members`."""
        positions = tuple((members[index], first, count) for index, first, count in batch.places)
        return cls(positions, batch.whole, batch.held)


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
        reports: this rank's fates count (`Mesh.reports`).
    """

    def __init__(self, items: Sequence[Item], wanted: Sequence[int], most: int, reports: bool) -> None:
        self._reports = reports
        self.blocks: dict[int, _Block] = {}
        start = 0
        for i in wanted:
            self.blocks[i] = _Block(start, *kept(items[i].sampled, most))
            start = self.blocks[i].end
        self._size = start
        self._seen: list[tuple[_Rows, torch.Tensor, Fates]] = []
        self._differs: dict[_Places, tuple[_Rows, torch.Tensor]] = {}

    def observer(self, members: Sequence[int]) -> Callable[[MicroBatch, Fates], None]:
        """Return what is to be told the fates of each micro-batch of an update; `members`: as `Update.members`."""

        def observe(batch: MicroBatch, fates: Fates) -> None:
            if self._reports and self._has(members, batch):
                self._seen.append((_Rows.of(members, batch), batch.advantages, fates))

        return observe

    def counter(self, members: Sequence[int]) -> Callable[[MicroBatch], torch.Tensor | None]:
        """Return what gives for each micro-batch int32[T], to which routers add the rows they disagree on; None: nobody asks."""

        def count(batch: MicroBatch) -> torch.Tensor | None:
            if not self._has(members, batch):
                return None
            rows = _Rows.of(members, batch)
            if rows.positions not in self._differs:
                self._differs[rows.positions] = rows, torch.zeros(batch.rows, dtype=torch.int32, device=batch.tokens.device)
            return self._differs[rows.positions][1]

        return count

    def values(self, trajectories: Mapping[int, Trajectory]) -> torch.Tensor:
        """Return this rank's part of the array: float64, zero where another rank has the value.

        Args:
            trajectories: those this rank has fetched, by position in the batch.
        """
        flat = np.zeros(self._size)
        for rows, advantages, fates in self._seen:
            found = torch.stack([fates.logprobs, fates.proximal, fates.weight, advantages, _states(fates).float()])
            values = found.cpu().numpy()
            for i, block, begins, here, at in self._kept(rows, trajectories):
                if begins:
                    flat[block.start] = records.digest_of(trajectories[i].tokens, trajectories[i].logprobs)
                of = flat[block.start + 1 : block.start + 1 + _MISMATCH * block.count].reshape(_MISMATCH, block.count)
                of[:, here] = values[:, at]
        for rows, differs in self._differs.values():
            counts = differs.cpu().numpy()
            for _, block, _, here, at in self._kept(rows, trajectories):
                flat[block.end - block.count : block.end][here] = counts[at]
        return torch.from_numpy(flat)

    def _has(self, members: Sequence[int], batch: MicroBatch) -> bool:
        return any(members[index] in self.blocks for index, _, _ in batch.places)

    def _kept(self, rows: _Rows, trajectories: Mapping[int, Trajectory]) -> list[tuple[int, _Block, bool, np.ndarray, np.ndarray]]:
        """Return position and block of each kept trajectory in a micro-batch, whether this rank has its first row, which of its values this
        rank has (bool[block.count]), and in which of its rows (int64)."""
        place = np.arange(rows.whole)
        if rows.held is not None:
            place, held = np.full(rows.whole, -1), rows.held.cpu().numpy()
            place[held] = np.arange(len(held))
        found = []
        for i, first, _ in rows.positions:
            if (block := self.blocks.get(i)) is not None:
                at = place[first + ends(trajectories[i].loss_mask.nonzero()[0], block.head, block.tail) - 1]
                found.append((i, block, bool(place[first] >= 0), at >= 0, at[at >= 0]))
        return found


class TrainerSamples:
    """The samples of a run, on one rank. Every rank makes the same calls.

    Args:
        done: optimizer steps taken so far.
        layers: layers whose routing is kept.
    """

    def __init__(self, config: Config, mesh: Mesh, done: int, layers: int) -> None:
        self._section, self._mesh, self._layers = config.telemetry.samples, mesh, layers
        self._choice = choice_of(config)
        self._same_proximal = config.objective.proximal == "recompute" and config.objective.updates_per_batch == 1
        write = mesh.rank == 0 and self._section.groups > 0
        self._file = SampleFile(config.run.dir, records.TRAINER_SAMPLES, records.MOST_BYTES, done) if write else None

    def of(self, items: Sequence[Item]) -> BatchSamples | None:
        """Return a collector for a batch; None if it has no kept group."""
        groups = {group for group in {item.group for item in items} if self._choice.takes(group)}
        wanted = [i for i, item in enumerate(items) if item.group in groups]
        return BatchSamples(items, wanted, records.MOST_TOKENS, self._mesh.reports) if wanted else None

    def write(self, batch: BatchSamples, items: Sequence[Item], trajectories: Mapping[int, Trajectory], version: int) -> None:
        """Add up the ranks' values of a trained batch and write them. Collective over all ranks.

        Args:
            version: the trainer's weight version before the step.
        """
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
            sampled=item.sampled,
            logprobs=found["logprobs"],
            proximal=[] if self._same_proximal else found["proximal"],
            advantages=_one_or_all(found["advantages"]),
            weights=_one_or_all(found["weights"]),
            states="".join(map(_STATES.__getitem__, map(int, found["states"]))),
            mismatch=[*map(int, found["mismatch"])] if self._layers else [],
            layers=self._layers,
            group_weight=item.weight,
        )


def _states(fates: Fates) -> torch.Tensor:
    """Return the place in `_STATES` of each row: int64[T]."""
    first = fates.rejected.int().argmax(dim=0) + len(_STATES) - len(RULES)
    unkept = torch.where(fates.rejected.any(dim=0), first, _STATES.index(records.NO_WEIGHT))
    used = torch.where(fates.cut, _STATES.index(records.CLIPPED), torch.where(fates.capped, _STATES.index(records.CAPPED), 0))
    return torch.where(fates.kept, used, unkept)


def _one_or_all(values: list[float]) -> float | list[float]:
    """Return the one value of a list of equal finite ones, else the list."""
    return values[0] if values and math.isfinite(values[0]) and values.count(values[0]) == len(values) else values
