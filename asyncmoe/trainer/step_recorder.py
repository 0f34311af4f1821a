"""Writes the record of each step that is trained (`asyncmoe.flight.records`), and proves steps that a restart trains again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from asyncmoe.config import Config
from asyncmoe.errors import DataError, InvariantBroken, StorageError
from asyncmoe.flight import compare, records
from asyncmoe.flight.circumstances import circumstances
from asyncmoe.flight.records import Started, StepRecords, TrainedStep
from asyncmoe.flight.verdict import sentence
from asyncmoe.platform import collectives
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Leased
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.trainer.checks import Guard
from asyncmoe.trainer.model import deterministic
from asyncmoe.trainer.model.digests import StateDigests

if TYPE_CHECKING:  # import Megatron
    from megatron.core.optimizer import MegatronOptimizer

    from asyncmoe.trainer.learned import Learned
    from asyncmoe.trainer.model.gpt import Model

log = logging.getLogger(__name__)


class StepRecorder:
    """Records the steps of one trainer. Every rank makes the same calls; rank 0 writes to `run.dir`.

    A record that cannot be written is lost, which is logged once; training goes on.

    Args:
        done: steps taken before.
        plugins: digests of the source files of the objective's plug-ins, by name.

    Attributes:
        same: whether the steps that an earlier start of the run took after `done` are trained again with the same bits. Their new records
            must then equal the old ones.
    """

    def __init__(self, config: Config, model: Model, optimizer: MegatronOptimizer, done: int, plugins: Mapping[str, str]) -> None:
        # Without determinism digests prove nothing, and on a GPU they take some percent of a step.
        wanted = deterministic.wanted(config)
        self._digests, self._first = StateDigests(model, optimizer) if wanted else None, model.mesh.rank == 0
        self._gradient: list[bytes] = []
        self._lines: JsonLines | None = None
        self._before = StepRecords({}, {})
        self.started = Started(
            done,
            config.model_dump(mode="json"),
            circumstances(config, plugins),
            self._digests.tensors if self._digests else (),
            wanted,
        )
        if self._first:
            self._before = _before(config, done)
            self._lines = JsonLines(config.run.dir / records.TRAINED, mode=0o600)
            self._write(self.started)
        starts = [start for start in (*self._before.starts.values(), self._before.newest) if start is not None]
        self.same = collectives.everyones(bool(starts) and all(same_bits(start, self.started) for start in starts))[0]

    def watched(self, guard: Guard) -> Guard:
        """Return a guard that also digests the gradients of each update that `guard` allows."""
        gradient = self._gradient = []

        def watching(values: Mapping[str, float]) -> bool:
            allowed = guard(values)
            if "loss" in values:
                gradient.append(b"")
            elif allowed and self._digests:
                gradient[-1] = self._digests.gradient().astype("<u8").tobytes()
            return allowed

        return watching

    def record(self, step: int, leased: Leased, learned: Learned) -> TrainedStep:
        """Record a step of reinforcement learning; `step`: steps taken, this one included. Collective over all ranks.

        From the first batch on that is not leased again, because damage to the log has ended the replays, steps are new ones.

        Raises:
            InvariantBroken: the step was trained again (`same`), and its record differs from the first one.
        """
        made = TrainedStep(
            step=step,
            items=digest_of(leased.items),
            schedule=learned.schedule,
            refused=tuple(update.refused for update in learned.updates),
            advantages=learned.advantages.astype("<f4").tobytes(),
            lr=learned.updates[-1].lr,
            loss=tuple(update.loss for update in learned.updates),
            grad_norm=tuple(update.grad_norm for update in learned.updates),
            gradient=tuple(self._gradient),
            weights=self._digests.weights().astype("<u8").tobytes() if self._digests else b"",
            optimizer=self._digests.optimizer().astype("<u8").tobytes() if self._digests else b"",
        )
        self.same = self.same and leased.replayed
        differs = self._differs(made) if self.same and self._first else ""
        if told := collectives.everyones(differs)[0] if self.same else "":
            hint = "this machine does not compute the same twice; run.deterministic=false trains the lost steps again all the same"
            raise InvariantBroken(f"{told}; the step was trained before the restart, too; {hint}")
        self._write(made)
        return made

    def _differs(self, made: TrainedStep) -> str:
        """Return how a step differs from its record before the restart; "" if it does not, or has none."""
        then = self._before.steps.get(made.step)
        here = StepRecords({made.step: made}, {made.step: self.started})
        if then is None or (found := compare.first_difference(self._before, here, range(made.step, made.step + 1))) is None:
            return ""
        return sentence(found)

    def _write(self, record: Started | TrainedStep) -> None:
        if self._lines is None:
            return
        try:
            self._lines.append(msgspec.json.encode(record) + b"\n")
        except StorageError as error:
            log.error("%s; from here on steps have no records and cannot be replayed", error)
            self._lines.close()
            self._lines = None


def digest_of(items: Sequence[Item]) -> str:
    """Return the digest of a batch's metadata, 16 hexadecimal digits; the batch's place in the log does not count."""
    plain = [msgspec.structs.replace(item, place=None) for item in items]
    return hashlib.sha256(msgspec.msgpack.encode(plain)).hexdigest()[:16]


def same_bits(one: Started, other: Started) -> bool:
    """Return whether the same batch gives the same bits in both starts of a trainer."""
    return one.deterministic and other.deterministic and not compare.reasons(one, other)


def _before(config: Config, done: int) -> StepRecords:
    """Return the records of steps after `done`, which an earlier start of the run trained."""
    try:
        found = records.read(config.run.dir)
    except DataError:  # it has none
        return StepRecords({}, {})
    steps = {step: one for step, one in found.steps.items() if step > done}
    return StepRecords(steps, {step: found.starts[step] for step in steps}, found.newest)
