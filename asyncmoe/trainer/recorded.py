"""`torchrun ... -m asyncmoe.trainer.recorded CONFIG STAGE`: train on the recorded batches of a run, without engines and controller.

The records of the steps, and a checkpoint if the stage asks for one, go to the configuration's run.dir, as those of a run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncmoe import config as configuration
from asyncmoe.checkpoints import directories
from asyncmoe.config import Config
from asyncmoe.errors import DataError
from asyncmoe.flight import agreement
from asyncmoe.flight.agreement import StaleTokens
from asyncmoe.flight.records import TrainedStep
from asyncmoe.flight.source import RecordedRun
from asyncmoe.flight.stage import FINDINGS, Stage, StepFinding
from asyncmoe.imports import uncollected
from asyncmoe.process import freeze, run_rank
from asyncmoe.telemetry.clock import unix
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.schema import METRICS, Resume
from asyncmoe.trajectory import decode

if TYPE_CHECKING:  # imports Megatron
    from asyncmoe.trainer.batch_trainer import Learner, LogProbs


def told(source: RecordedRun, step: int, sizes: Mapping[str, str]) -> TrainedStep | None:
    """Return the record of a step (steps taken, this one included), without its micro-batches if it had other parallel sizes; None:
    it has none."""
    found = source.recorded.steps.get(step)
    if found is None or source.recorded.starts[step].sizes == sizes:
        return found
    return msgspec.structs.replace(found, schedule=())


def run(config: Config, stage: Stage) -> None:
    """Train a stage. Collective over torchrun's ranks.

    Raises:
        UserError: the model, a plug-in, the checkpoint or the records cannot be used.
        StorageError: the checkpoint cannot be written.
    """
    from asyncmoe import models  # Megatron must not be imported before the platform is prepared
    from asyncmoe.trainer import start
    from asyncmoe.trainer.batch_trainer import Learner
    from asyncmoe.trainer.model import checkpoint_choice, mesh
    from asyncmoe.trainer.model.checkpoint_saver import Saver, Stood
    from asyncmoe.trainer.model.differences import differences
    from asyncmoe.trainer.records import step_record
    from asyncmoe.trainer.samples import TrainerSamples
    from asyncmoe.trainer.step_recorder import StepRecorder

    source = RecordedRun.of(Path(stage.source))
    place, plugins = start.join(config)
    first = Path(stage.checkpoint) if stage.checkpoint else None
    if first is not None and (fault := checkpoint_choice.agreed_fault(first, place)) is not None:
        raise DataError(str(first), got=fault, expected="undamaged files", hint="move it away, and training begins with an earlier one")
    built, adam, done = start.load(config, place, first)
    routing = models.kept_routing(config, built.hf)
    samples = TrainerSamples(config, place, done, 0 if routing is None else len(routing.layers))
    recorder = StepRecorder(config, built, adam, done, plugins.sources)
    learner = Learner(config, built, adam, source.batches.frames, start.replay(config, built), plugins, samples, recorder)
    metrics = JsonLines(config.run.dir / METRICS) if place.rank == 0 else None
    if metrics is not None:
        metrics.write(Resume(resumed_at=done, time=unix(), epoch=0))
    check = TokenCheck(learner, source, stage.last)
    freeze()
    for step in range(done, stage.last):
        stale = check.at(step) if stage.tokens else ()
        begin, leased = unix(), source.batches.leased(step)
        then = told(source, step + 1, recorder.started.sizes)
        got = unix()
        learned = learner.learn(leased, "rl", step, lambda: None, then if stage.replays else None)
        made = recorder.record(step + 1, leased, learned)
        if metrics is not None:
            metrics.write(step_record(step + 1, leased, "rl", learned, None, 0.0, (begin, begin, got, unix()), Stood()))
        known = directories.directory(source.folder, step + 1)
        checked = stage.replays and then is not None and made.weights != then.weights and known.is_dir()
        found = StepFinding(step + 1, tuple(differences(known, built)) if checked else (), tuple(stale))
        if place.rank == 0 and (found.tensors or found.stale):
            with JsonLines(config.run.dir / FINDINGS) as lines:
                lines.append(msgspec.json.encode(found) + b"\n")
    if stage.saves and stage.last > done:
        saver = Saver(config, built, adam)
        saver.save(stage.last)
        saver.settle()
    mesh.stop()


class TokenCheck:
    """Looks for tokens that fit another version than theirs, while the weights of each version pass by. Every rank makes the same calls."""

    def __init__(self, learner: Learner, source: RecordedRun, last: int) -> None:
        self._learner, self._batches, self._last = learner, source.batches, last
        self._scored: dict[int, dict[int, LogProbs]] = {}

    def at(self, step: int) -> list[StaleTokens]:
        """Score the tokens of this version and the next with the current weights, version `step`; return the findings of the batch
        of that step, whose versions have all passed by."""
        for later in range(step, self._last):
            leased = self._batches.leased(later)
            if min(item.oldest_version for item in leased.items) > step + 1:
                break
            self._scored.setdefault(later, {})[step] = self._learner.scored(leased)
        items = self._batches.leased(step).items
        trajectories = {i: decode(self._batches.frames([item], (), False)) for i, item in enumerate(items)}
        return agreement.stale(step + 1, trajectories, self._scored.pop(step, {}))


def main() -> None:
    """Run the stage; print user-facing errors as one line."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(format=f"%(asctime)s rank {rank} %(name)s: %(message)s", level=logging.INFO)

    def act() -> None:
        config = configuration.load(Path(sys.argv[1]))
        stage = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Stage)
        with uncollected():
            from asyncmoe.trainer.model import environment

            environment.prepare(config)
            from asyncmoe.platform import megatron

            megatron.prepare()
        run(config, stage)

    run_rank(f"replay.{rank}", act)


if __name__ == "__main__":
    main()
