"""A rank of the trainer without Megatron: `python -m tests.chaos.stand.rank CONFIG`, started by `agent`.

It sends the real messages through the real client, in the real order (`asyncmoe.trainer.loop`), saves real checkpoints, and publishes
versions while it goes on (`publisher`). Training is a pause and a digest of the batch. Both ranks check every trajectory that they fetch
against the weights that were published under its versions. Rank 0 writes `CHAOS_FOLDER/trained.jsonl`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from asyncmoe import checkpoints
from asyncmoe import config as configuration
from asyncmoe.checkpoints import directories, intact
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, WaitTimeout, WeightSyncError
from asyncmoe.process import die_with_parent, leave, named, say
from asyncmoe.rpc import keys
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.environment import trainer_epoch
from asyncmoe.rpc.messages import Commit, Goodbye, Hello, Lease, Leased, Saved
from asyncmoe.rpc.peers import facts
from asyncmoe.storage import writing
from asyncmoe.telemetry import heartbeats, processes
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.schema import METRICS, Resume, Step
from asyncmoe.trainer.data import held
from asyncmoe.trajectory import Trajectory, decode, frames_in
from tests.chaos.stand import weights
from tests.chaos.stand.collective import Collective
from tests.chaos.stand.publisher import Publisher

log = logging.getLogger(__name__)
TRAIN_S = 0.25
_ANSWER_S, _PATIENCE_S, _SETTLING_S = 30.0, 1.0, 0.5
_PADDING = 100_000
"""Bytes of a rank's file in a checkpoint besides its weights."""


class Rank:
    """One rank, from its start to its goodbye."""

    def __init__(self, config: Config, rank: int, world: int, folder: Path) -> None:
        self._config, self._rank, self._world, self._folder = config, rank, world, folder
        self._everyones = Collective(folder, rank, world, config.trainer.timeout_s)
        self._step, self._part = self._loaded()
        rendezvous = keys.read(config.run.dir, config.engines.start_timeout_s)
        epoch = trainer_epoch()
        client, weights_client = (Client(rendezvous, f"trainer.{rank}{suffix}", epoch) for suffix in ("", ".weights"))
        self._client = client
        self._start = f"{os.environ['CHAOS_START']}.{epoch}"
        self._publisher = Publisher(config, weights_client, world) if rank == 0 else None
        self._total, self._saved, self._served, self._behind = config.warmup.steps + config.run.steps, self._step, 0, True

    def run(self) -> None:
        """Train until all steps are done or a lease asks to stop."""
        hello = Hello(
            self._rank,
            self._world,
            self._config.digest,
            self._step,
            facts(f"trainer.{self._rank}"),
            self._config.digest_without_layout,
        )
        welcome = self._ask(hello, _ANSWER_S + self._config.sync.timeout_s)
        self._served = welcome.version
        metrics = JsonLines(self._config.run.dir / METRICS) if self._rank == 0 else None
        if metrics is not None:
            metrics.write(Resume(resumed_at=self._step, time=time.time(), epoch=trainer_epoch()))
            self._note("trained", start=self._start, resumed_at=self._step)
        stopped = self._advance(metrics)
        if self._saved != self._step:
            self._save()
        try:
            self._settle()
        except WeightSyncError:
            if not stopped:
                raise
        self._ask(Goodbye(self._rank, self._step == self._total))

    def _advance(self, metrics: JsonLines | None) -> bool:
        """Take the remaining steps. Return whether the controller asked to stop before the last one."""
        try:
            self._publish_if_due()
            while self._step < self._total:
                if (leased := self._lease()).stop:
                    return True
                self._train(leased)
                if metrics is not None:
                    metrics.write(Step(step=self._step, phase="rl", time=time.time(), lineage=leased.lineage))
                if self._step % self._config.checkpoint_every == 0:
                    self._save()
        except WeightSyncError:
            # When a run stops, its remaining engines no longer matter.
            if self._step == self._total or not self._ask(self._terms(0.0)).stop:
                raise
            return True
        return False

    def _terms(self, wait_s: float) -> Lease:
        return Lease(self._step, "rl", self._config.rollout.batch, self._step, wait_s)

    def _settle(self) -> None:
        """Wait until the current version is served; a failure is raised on every rank."""
        settled, failure = self._publisher is None, ""
        until = time.monotonic() + self._config.engines.start_timeout_s + 4 * self._config.sync.timeout_s
        while True:
            heartbeats.beat("waiting for all engines to serve the new version")
            try:
                if self._publisher is not None:
                    settled = self._publisher.settled(_SETTLING_S)
            except AsyncmoeError as error:
                failure = str(error)
            settled, failure = self._everyones([settled, failure])[0]
            if failure or time.monotonic() > until:
                raise WeightSyncError(failure or "the version under way is not settled in time")
            if settled:
                return

    def _lease(self) -> Leased:
        until = time.monotonic() + self._config.queue.lease_timeout_s
        while True:
            if self._publisher is not None:
                self._publisher.check()
            heartbeats.beat(f"waiting for the batch of step {self._step + 1}")
            got = self._ask(self._terms(_PATIENCE_S), _PATIENCE_S + _ANSWER_S)
            if got.items or got.stop:
                return got
            if time.monotonic() > until:
                raise WaitTimeout("the engines", f"a batch of step {self._step}", self._config.queue.lease_timeout_s)

    def _train(self, leased: Leased) -> None:
        frames = held.fetch(self._client, leased.items[self._rank :: self._world], None, True)
        each = frames_in(1)
        batch = [decode(frames[at : at + each]) for at in range(0, len(frames), each)]
        self._check(batch)
        time.sleep(TRAIN_S)
        digests = self._everyones(weights.digest(batch))
        self._ask(Commit(leased.step))
        self._step += 1
        self._part = weights.trained(self._part, self._step, "".join(digests), self._start)
        if self._rank == 0:
            told = {"keys": [item.key for item in leased.items], "digests": digests, "replayed": leased.replayed, "time": time.time()}
            self._note("trained", start=self._start, step=self._step, lineage=leased.lineage, **told)
        self._publish_if_due()

    def _publish_if_due(self) -> None:
        """As `asyncmoe.trainer.loop`: nothing is published until the trainer has reached the version that the engines serve."""
        if self._step < self._served or self._step == self._total:
            return
        parts = self._everyones(self._part)
        self._settle()
        if self._publisher is not None:
            self._note("published", version=self._step, parts=parts)
            self._publisher.begin(self._step, parts)

    def _check(self, batch: list[Trajectory]) -> None:
        """Record every token not sampled by weights of its version."""
        known: dict[int, set[tuple[str, ...]]] = {0: {weights.FIRST}}
        for line in (self._folder / "published.jsonl").read_text().splitlines():
            said = json.loads(line)
            known.setdefault(said["version"], set()).add(tuple(said["parts"]))
        for one in batch:
            for fault in weights.faults(one, known):
                self._note("mixed", fault=fault)

    # ------------------------------------------------------------ checkpoints

    def _loaded(self) -> tuple[int, str]:
        """Return step and part of the newest intact checkpoint, which all ranks verify together."""
        for path in self._everyones([str(one) for one in directories.complete(self._config.run.dir)[::-1]])[0]:
            if not any(self._everyones(intact.fault(Path(path), rank=self._rank, world=self._world))):
                self._everyones("read")
                return int(checkpoints.facts(Path(path))["step"]), (Path(path) / f"part-{self._rank}").read_text()[: len(weights.FIRST[0])]
            if self._rank == 0:
                log.warning("set aside: %s", checkpoints.set_aside(Path(path)))
        return 0, weights.FIRST[self._rank]

    def _save(self) -> None:
        heartbeats.beat(f"the checkpoint of step {self._step}")
        run_dir = self._config.run.dir
        with writing(f"the checkpoint of step {self._step}", checkpoints.directory(run_dir, self._step)):
            if self._rank == 0:
                checkpoints.start(run_dir, self._step)
            self._everyones("started")
            (checkpoints.temporary(run_dir, self._step) / f"part-{self._rank}").write_text(self._part + "." * _PADDING)
            self._everyones("written")
            if self._rank == 0:
                checkpoints.finish(run_dir, self._step, {"step": self._step}, checkpoints.Retention.of(self._config))
                self._ask(Saved(self._step))
        self._saved = self._step
        self._everyones("saved")

    # ------------------------------------------------------------ helpers

    def _ask(self, request: Any, timeout_s: float = _ANSWER_S) -> Any:
        return self._client.ask(request, timeout_s)[0]

    def _note(self, name: str, **said: Any) -> None:
        with (self._folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(said) + "\n")


def main() -> None:
    """Train; print user-facing errors as one line, as `asyncmoe.trainer.__main__` does."""
    die_with_parent()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(format=f"%(asctime)s rank {rank} %(name)s: %(message)s", level=logging.INFO)
    try:
        with named(f"trainer.{rank}"):
            config = configuration.load(Path(sys.argv[1]), [])
            processes.record(config.run.dir, f"trainer.{rank}")
            heartbeats.start(config.run.dir, f"trainer.{rank}", config.watch.beat_s)
            Rank(config, rank, world, Path(os.environ["CHAOS_FOLDER"])).run()
            heartbeats.beat(heartbeats.ENDED)
    except AsyncmoeError as error:
        say(error)
        leave(error.exit_code)
    leave(0)


if __name__ == "__main__":
    main()
