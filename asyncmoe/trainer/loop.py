"""The training loop: lease a batch, train on it, publish the new weights, repeat.

Step k leases batch k, trains with the weights of version k and produces version k + 1. Every rank sends its own requests and gets the
same answers, so the ranks need no collective to agree on the next action.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from asyncmoe import checkpoints, models
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, RunStopping, WeightSyncError
from asyncmoe.occupancy import DeviceTurn, Event
from asyncmoe.platform import collectives
from asyncmoe.process import freeze
from asyncmoe.rpc import keys
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.environment import trainer_epoch
from asyncmoe.rpc.messages import Commit, Evaluated, Evaluations, Goodbye, Hello, Leased, Phase, Saved, Welcome
from asyncmoe.rpc.peers import facts
from asyncmoe.telemetry import heartbeats
from asyncmoe.telemetry.clock import unix
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.schema import METRICS, TRAINER_SPANS, Resume, Span
from asyncmoe.trainer import loaded_weights, start
from asyncmoe.trainer.batch_trainer import Learner
from asyncmoe.trainer.checks import SKIPPED
from asyncmoe.trainer.data import batch_client, held
from asyncmoe.trainer.device_turns import TrainerTurns
from asyncmoe.trainer.learned import Learned
from asyncmoe.trainer.model import checkpoint_choice, gpt, mesh
from asyncmoe.trainer.model.checkpoint_saver import Saver
from asyncmoe.trainer.model.sleep import Sleeper
from asyncmoe.trainer.objective import Plugins
from asyncmoe.trainer.profiling import Profiler, mark
from asyncmoe.trainer.records import step_record
from asyncmoe.trainer.samples import TrainerSamples
from asyncmoe.trainer.step_recorder import StepRecorder
from asyncmoe.weights.sender.broadcast import BroadcastPublisher
from asyncmoe.weights.sender.deltas import unsupported
from asyncmoe.weights.sender.disk import DiskPublisher
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.gather import Gatherer
from asyncmoe.weights.sender.publisher import Published, Publisher
from asyncmoe.weights.sender.reshard import ReshardPublisher

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

log = logging.getLogger(__name__)
_EVALUATION_S = 5.0
"""Seconds between heartbeats while waiting for the last evaluation."""
_NOTICED_S = 0.001
"""Seconds; what takes less gets no span."""


def run(config: Config) -> None:
    """Train until all steps are done or the controller asks to stop. Collective over torchrun's ranks."""
    place, plugins = start.join(config)
    newest = checkpoint_choice.choose(config.run.dir, place)
    turns = TrainerTurns(config, place) if config.in_turn else None
    if turns is not None:
        turns.wait_for(DeviceTurn.TRAINING, Event.STARTED)
    built, adam, done = start.load(config, place, newest)
    rendezvous = keys.read(config.run.dir, wait_s=config.engines.start_timeout_s)
    client, weights = (Client(rendezvous, f"trainer.{place.rank}{suffix}", trainer_epoch()) for suffix in ("", ".weights"))
    expected = ExpectedChecksums(config, built)
    sync = publisher(config, built, weights, expected)
    if turns is not None:
        turns.sleeper = Sleeper(config, built, adam, lambda: sync.copies)
    Trainer(config, built, adam, client, sync, expected, done, plugins, turns).run()
    # After an error nothing is closed: the process prints the error and exits at once (`asyncmoe.trainer.__main__`), before closing could
    # fail.
    if turns is not None:
        turns.close()
    weights.close()
    client.close()
    mesh.stop()


class Trainer:
    """Runs the loop on one rank. Rank 0 also writes the records."""

    def __init__(
        self,
        config: Config,
        built: gpt.Model,
        adam: MegatronOptimizer,
        client: Client,
        sync: Publisher,
        expected: ExpectedChecksums,
        done: int,
        plugins: Plugins,
        turns: TrainerTurns | None = None,
    ) -> None:
        self._turns = turns
        place = built.mesh
        self._config, self._mesh, self._model, self._client = config, place, built, client
        routing = models.kept_routing(config, built.hf)
        samples = TrainerSamples(config, place, done, 0 if routing is None else len(routing.layers))
        self._recorder = StepRecorder(config, built, adam, done, plugins.sources)
        fetch = partial(held.fetch, client)
        self._learner = Learner(config, built, adam, fetch, start.replay(config, built), plugins, samples, self._recorder)
        self._step = self._saved = done
        self._served, self._behind = 0, True  # until this trainer has published a version, engines may be ahead of it
        self._first = place.rank == 0
        self._total = config.warmup.steps + config.run.steps
        self._sync, self._expected, self._saver = sync, expected, Saver(config, built, adam)
        self._waits: list[tuple[float, float]] = []
        self._published: Published | None = None  # in turn: the version that the next step's record tells of
        self._left: float | None = None  # in turn: when the devices began to be left to engines, which is part of the next step
        self._profiler = Profiler(config, place.rank)
        self._metrics = JsonLines(config.run.dir / METRICS) if self._first else None
        self._spans = JsonLines(config.run.dir / TRAINER_SPANS) if self._first else None

    def run(self) -> None:
        """Train until all steps are done or a lease asks to stop."""
        config = self._config
        ours = facts(f"trainer.{self._mesh.rank}")
        same = self._recorder.same
        hello = Hello(self._mesh.rank, self._mesh.world, config.digest, self._step, ours, config.digest_without_layout, same)
        # The controller first aborts whatever a previous trainer had in progress with the engines.
        welcome = self._client.ask(hello, ANSWER_S + config.sync.timeout_s)[0]
        assert isinstance(welcome, Welcome)
        self._served = welcome.version
        if self._metrics is not None:
            self._metrics.write(Resume(resumed_at=self._step, time=unix(), epoch=trainer_epoch()))
        freeze()
        stopped = self._train()
        if self._saved != self._step:
            self._take_turn(DeviceTurn.TRAINING)
            self._save()
        self._saver.settle()
        self._tell_saved()
        try:
            self._sync.settle()
        except (WeightSyncError, RunStopping) as error:
            if not stopped:
                raise
            log.warning("version not published: %s", error)
        if self._config.evaluation.every and self._step == self._total:
            self._evaluate_last()
        self._client.ask(Goodbye(self._mesh.rank, finished=self._step == self._total), ANSWER_S)
        self._sync.close()

    def _train(self) -> bool:
        """Take the remaining steps. Return whether the controller asked to stop before the last one."""
        config = self._config
        try:
            if config.warmup.steps <= self._step < self._total and self._due:
                self._begin_sync()
            while self._step < self._total:
                self._tell_saved()
                asked = unix()
                begin, self._left = self._left or asked, None
                leased = batch_client.lease(self._client, config, self._step, self._phase, self._sync.check, self._any_has)
                self._span("wait", asked, unix())
                self._take_turn(DeviceTurn.TRAINING)
                if leased.stop:
                    return True
                with self._profiler.step(self._step + 1):
                    self._advance(leased, begin, asked)
        except (WeightSyncError, RunStopping) as error:
            # A run that stops while its engines start has no engines to publish to, which is no error. If the failure came in the middle of
            # a step, the lease returns the same batch again, not a stop.
            if self._step == self._total or not batch_client.stopping(self._client, config, self._step, self._phase):
                raise
            log.warning("version not published: %s", error)
            return True
        return False

    def _evaluate_last(self) -> None:
        """Publish the last version and wait for its evaluation, unless it was evaluated before a restart. Everything is trained and saved,
        so a failure here costs only the evaluation."""
        known = self._evaluated(0.0).known if self._first else False
        if collectives.everyones(known)[0] or self._step < self._served:
            return
        try:
            self._begin_sync()
            self._sync.settle()
            while not self._evaluated(_EVALUATION_S).ended:
                pass
        except AsyncmoeError as error:
            log.warning("version %d, the last, is not evaluated: %s", self._step, error)

    def _evaluated(self, wait_s: float) -> Evaluated:
        heartbeats.beat("the last evaluation")
        evaluated = self._client.ask(Evaluations(self._step, wait_s), ANSWER_S + wait_s)[0]
        assert isinstance(evaluated, Evaluated)
        return evaluated

    @property
    def _phase(self) -> Phase:
        return "warmup" if self._step < self._config.warmup.steps else "rl"

    def _advance(self, leased: Leased, begin: float, asked: float) -> None:
        """Run one step: train on the batch, end its lease, publish, record, save.

        The last step of the warm-up is recorded and saved before its weights are published, because publishing waits for engines, which may
        never start; and, where engines use the same devices in turn, every step, because publishing releases the optimizer's state.
        """
        phase, got = self._phase, unix()
        self._waits.clear()
        learned = self._learner.learn(leased, phase, self._step, self._before_update)
        trained = unix()
        for part in between(got, trained, self._waits):
            self._span("train", *part)
        dropped = f"{SKIPPED}{learned.untrained}" if learned.untrained else ""
        if phase == "rl":
            self._recorder.record(self._step + 1, leased, learned)
        self._client.ask(Commit(leased.step, dropped), ANSWER_S)
        self._step += 1
        warm = self._step == self._config.warmup.steps
        publishes = self._config.warmup.steps <= self._step < self._total and self._due
        late = warm or self._turns is not None
        published, self._published = self._published, None
        if publishes and not late:
            published = self._publish()
        self._record(leased, phase, learned, published, (begin, asked, got, trained))
        every = self._config.checkpoint_every
        if warm or (every and self._step % every == 0):
            self._save()
        if publishes and late:
            self._left = None if self._turns is None or warm else unix()
            self._publish()

    def _publish(self) -> Published | None:
        """Begin to publish the weights; return the version before, once engines serve it."""
        with self._waiting_for_sync(), mark("publish"):
            published = self._sync.settle()
            self._begin_sync()
        return published

    @property
    def _due(self) -> bool:
        """Whether to publish the weights: once they are no older than those of the engines, then every `sync.every` steps."""
        every = self._config.sync.every
        return self._step >= self._served and (self._behind or (self._step - self._config.warmup.steps) % every == 0)

    def _begin_sync(self) -> None:
        """Begin to publish the weights; where devices are used in turn, finish too, so that engines have their turn."""
        kept = self._config.adapter is not None and self._expected.of_loaded
        if self._behind and kept:
            self._expected.of_files()  # while the weights under adapters are here
        self._take_turn(DeviceTurn.WAKING)
        gpt.gather_weights(self._model)
        if self._behind and (self._turns is None or kept):  # else engines have lost what they loaded, or cannot be asked before they wake
            loaded_weights.compare(self._model, self._expected, self._client, self._step)
        if self._turns is not None:
            self._publish_in_turn(self._turns)
        else:
            self._sync.begin(self._step)
        self._behind = False

    def _publish_in_turn(self, turns: TrainerTurns) -> None:
        """Publish, and leave the devices to the engines. If all are lost meanwhile, they start again only after this trainer's turn."""
        for left in reversed(range(self._config.engines.restarts + 1)):
            try:
                with turns.part("update"):
                    self._sync.begin(self._step)
                    self._published = self._sync.settle()
                break
            except WeightSyncError as error:
                if not left or batch_client.stopping(self._client, self._config, self._step, self._phase):
                    raise
                log.warning("%s; waiting for an engine to start", error)
                self._take_turn(DeviceTurn.WAKING, Event.YIELDED)
        self._take_turn(DeviceTurn.GENERATING)

    def _any_has(self, got: bool) -> bool:
        """Return whether any rank has the batch. If engines that use the same devices in turn have lost the weights, send them again."""
        if self._turns is None:
            return got
        if any(collectives.everyones(got)):
            return True
        if self._phase == "rl" and collectives.everyones(self._first and self._sync.starving())[0]:
            self._begin_sync()
        return False

    def _take_turn(self, turn: DeviceTurn, event: Event | None = None) -> None:
        if self._turns is not None:
            begin = unix()
            self._turns.wait_for(turn, event)
            self._span("switch", begin, unix())

    def _before_update(self) -> None:
        with self._waiting_for_sync(), mark("wait for weight sync"):
            self._sync.wait_sent()

    @contextmanager
    def _waiting_for_sync(self) -> Iterator[None]:
        begin = unix()
        yield
        self._waits.append((begin, end := unix()))
        self._span("sync", begin, end)

    def _save(self) -> None:
        heartbeats.beat(f"the checkpoint of step {self._step}")
        with mark("save checkpoint"):
            self._saver.save(self._step)
            if self._turns is not None:
                self._saver.settle()
        self._saved = self._step
        self._tell_saved()

    def _tell_saved(self) -> None:
        """Tell the controller which checkpoints have become complete, or raise a failed save's error."""
        for step, seconds in self._saver.saved():
            if self._first:
                self._client.ask(Saved(step), ANSWER_S)
                log.info("saved %s in %.1f s", checkpoints.directory(self._config.run.dir, step), seconds)

    def _span(self, what: str, begin: float, end: float) -> None:
        if self._spans is not None and end - begin > _NOTICED_S:
            self._spans.write(Span("trainer.0", what, begin, end))  # type: ignore[arg-type]  # one of the schema's names

    def _record(
        self, leased: Leased, phase: Phase, learned: Learned, published: Published | None, times: tuple[float, float, float, float]
    ) -> None:
        if self._metrics is not None:
            waited = sum(end - begin for begin, end in self._waits)
            switched = None if self._turns is None else self._turns.seconds()
            self._metrics.write(step_record(self._step, leased, phase, learned, published, waited, times, self._saver.stood(), switched))


def between(begin: float, end: float, gaps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the parts of an interval outside `gaps`, which are in order and do not overlap; gaps up to `_NOTICED_S` are ignored."""
    edges = [begin, *(edge for gap in gaps if gap[1] - gap[0] > _NOTICED_S for edge in gap), end]
    return list(zip(edges[::2], edges[1::2], strict=True))


def publisher(config: Config, built: gpt.Model, client: Client, expected: ExpectedChecksums) -> Publisher:
    """Return the weight publisher for the configured method.

    Args:
        client: connection to the controller, used only by the publisher.
        expected: checksums of `built`.

    Raises:
        ConfigError: the method does not support the configuration.
    """
    if built.mesh.rank == 0 and (why := unsupported(config)):
        log.info("weight updates are full, although sync.delta is auto: %s", why)
    if config.sync.method == "reshard":
        return ReshardPublisher(config, built, client, expected)
    if config.sync.method == "disk":
        return DiskPublisher(config, built, client, expected)
    gatherer = Gatherer(built, config.sync.bucket_bytes, config.sync.timeout_s, quantised=True)
    return BroadcastPublisher(config, gatherer, client, built.mesh, expected)
