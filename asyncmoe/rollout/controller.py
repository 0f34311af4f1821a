"""The controller: lets engines join, fills the queue, and serves the trainer until the trainer's goodbye."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from asyncmoe import models
from asyncmoe.async_tasks import cancelled, first_of
from asyncmoe.config import Config
from asyncmoe.engines import probes
from asyncmoe.engines.liveness import PAUSE_SHARE
from asyncmoe.engines.succession import Succession
from asyncmoe.errors import AsyncmoeError, EngineError, Interrupted, ProtocolError
from asyncmoe.process import freeze, keep_files, named
from asyncmoe.rollout import parts
from asyncmoe.rollout.engine_lifecycle import EngineLifecycle
from asyncmoe.rollout.evaluation import Evaluator
from asyncmoe.rollout.producer import Producer, demonstrate
from asyncmoe.rollout.recorder import Recorder
from asyncmoe.rollout.run_log import RunLog
from asyncmoe.rollout.tasks import Tasks
from asyncmoe.rollout.trainer_session import TrainerSession
from asyncmoe.rollout.workers.fleet import WorkerFleet
from asyncmoe.rollout.workers.process import WorkerProcesses
from asyncmoe.rpc import address, keys
from asyncmoe.rpc.messages import (
    Commit,
    Done,
    EngineOrder,
    EngineRequest,
    Evaluated,
    Evaluations,
    FindWorker,
    Hello,
    Reply,
    Request,
    Saved,
    TrainerMessage,
    WeightsLoaded,
    WeightsRequest,
)
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerJoin, WorkerRequest
from asyncmoe.telemetry import heartbeats
from asyncmoe.trajectory import Buffer
from asyncmoe.weights.coordinator import turns
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator
from asyncmoe.weights.coordinator.driver import UpdateDriver

log = logging.getLogger(__name__)
_RECORD_S = 1.0
_LAST_WORDS_S = 1.0
"""Seconds at the end in which requests are still answered, so that the trainer learns of a failure, and ranks learn that they may leave."""


@named("controller")
def run(config: Config, run_dir: Path) -> None:
    """Serve one run, from the engines' joining to the trainer's goodbye.

    Returns after the trainer's goodbye or SIGTERM. SIGINT asks the trainer to save and say goodbye; a second SIGINT acts like SIGTERM.
    Every process started here has ended when this function returns or raises.

    Raises:
        Interrupted: SIGINT arrived before the trainer did, so there was nothing to save.
        UserError: the task, an answer, the scorer, the environment, the tokenizer, a port or the engines' Python is unusable, or the run
            has another controller; nothing was sampled.
        EngineError: an engine did not start, or none is left.
        AsyncmoeError: any other failure that ended the run early.
    """
    keys.refuse_another(run_dir)
    asked = parts.questions(config)
    run_log = RunLog.open(config, models.recording(config, models.hf_config_of(config)))
    keep_files()
    parts.run(_serve(config, run_dir, asked, run_log))


async def _serve(config: Config, run_dir: Path, asked: Tasks, run_log: RunLog) -> None:
    recorder = Recorder(run_dir)
    succession = Succession(run_dir) if config.survives_controller else None  # after the log, which refuses a second controller
    try:
        if succession is not None and run_log.queue_log.state.first is None:  # no queue has used this log
            succession.forget()  # the engines' version belongs to steps that are no longer recorded
        controller = Controller(config, recorder, asked, run_log, succession)
        host, port = address.reachable(config.cluster.network), config.cluster.port
        here_only = not (address.several(config.cluster.network) or port)
        async with Server(controller.answer, host=host, port=port, here_only=here_only) as server:
            rendezvous = await server.start()
            keys.write(run_dir, rendezvous)
            workers = WorkerProcesses(config, run_dir)
            try:
                workers.start()
                await controller.run(server, workers)
            finally:
                keys.remove(run_dir, rendezvous)
                await asyncio.to_thread(workers.end)
    finally:
        if succession is not None:
            succession.close()
        recorder.close()
        await asyncio.to_thread(run_log.queue_log.close)


class Controller:
    """Connects the engines, the episodes and the trainer's session, and answers requests from the network."""

    def __init__(
        self,
        config: Config,
        recorder: Recorder,
        asked: Tasks,
        run_log: RunLog,
        succession: Succession | None = None,
    ) -> None:
        self._config, self._recorder, self._run_log = config, recorder, run_log
        self._task = asked.training
        self._pool = parts.pool_of(config, config.max_concurrent)
        untried = succession is None or not succession.before  # else the previous controller tried scorer and answers
        self._fleet = WorkerFleet(config, self._pool, recorder.generated, run_log.for_workers, untried)
        self._evaluator = Evaluator(config, self._fleet, asked.sets, recorder.evaluations.write)
        driver = UpdateDriver(
            self._pool,
            config.sync.timeout_s,
            recorder.paused,
            config.rollout.interruption,
            self._unfinished,
            config.engines.hang_timeout_s * PAUSE_SHARE,
            None if succession is None else succession.note,
        )
        self._coordinator = WeightUpdateCoordinator(driver, self._published, config.engines.start_timeout_s)
        self._lifecycle = EngineLifecycle(config, self._pool, self._coordinator, succession)
        if succession is not None:
            self._coordinator.succeed(succession.epoch, succession.weights.landed)
        self._session = TrainerSession(
            config,
            asked,
            run_log,
            self._pool,
            self._coordinator,
            self._lifecycle.taken,
            self._go_on,
            self._fleet.forget,
        )
        self._served = asyncio.Event()
        """Set once engines have weights that were compared with the trainer's, or came from the trainer."""
        self._over = asyncio.Event()
        self._trained = asyncio.Event()
        """Set once the last step is committed: nothing more is sampled for training."""
        self._failure: Exception | None = None
        self._stopping = False

    async def answer(self, request: Request) -> Reply | tuple[Reply, list[Buffer]]:
        """Answer one request of the trainer, an engine or a rollout worker."""
        if isinstance(request, TrainerMessage):
            self._session.check(request)
        if isinstance(request, WeightsRequest):
            return await self._coordinator.handle(request, partial(self._check_turn, request))
        if isinstance(request, EngineRequest):
            return await self._lifecycle.membership.handle(request)
        if isinstance(request, WeightsLoaded):
            return await self._compare(request)
        if isinstance(request, WorkerJoin):
            return await self._fleet.join(request)
        if isinstance(request, WorkerRequest):
            raise ProtocolError(f"{type(request).__name__}: sent to the controller, expected at a rollout worker")
        if isinstance(request, Hello):
            await self._session.greet(request)
        if (service := self._session.service) is None:
            raise ProtocolError(f"{type(request).__name__}: sent before any Hello, expected Hello first")
        if isinstance(request, Evaluations):
            return await self._evaluated(request)
        if isinstance(request, FindWorker):
            return await self._fleet.find(request)
        reply = await service(request)
        await self._note(request)
        if service.left:
            self._over.set()
        return reply

    async def _compare(self, request: WeightsLoaded) -> Done:
        if request.probe is None:
            await self._coordinator.compare_loaded(request.checksums, request.kept)
        else:
            most = self._config.verify.anomalies.kl_engine.above
            await probes.require(self._pool, request.probe, self._config.rollout.request_timeout_s, most)
        if request.first:
            for member in self._pool.present:
                if member.compared:
                    member.serve(0, self._pool.lineage)
            self._served.set()
        return Done()

    async def _note(self, request: TrainerMessage) -> None:
        if isinstance(request, Saved) and await self._run_log.saved():
            await self._retain()
        if isinstance(request, Commit) and request.step + 1 == self._config.warmup.steps + self._config.run.steps:
            self._trained.set()

    async def _retain(self) -> None:
        """Free the payloads that no record references."""
        needed = self._run_log.queue_log.state.payloads
        for place in (await self._session.joined()).shown:
            needed[place.writer] = min(place.position, needed.get(place.writer, place.position))
        self._fleet.retain(needed)

    def _check_turn(self, request: WeightsRequest) -> None:
        turns.check(request, self._pool.version, None if (queue := self._session.queue) is None else queue.trained_steps)

    async def run(self, server: Server, started: WorkerProcesses) -> None:
        """Run until the trainer's goodbye, a signal or a failure.

        Args:
            started: rollout workers of this machine.

        Raises:
            Exception: the first failure of any part.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        serving = asyncio.create_task(self._guard(server.serve()))
        work = (
            self._fleet.run(),
            started.watch(self._fleet.lost),
            *self._lifecycle.parts(),
            self._evaluator.run(),
            self._demonstrate(),
            self._produce(),
            self._record(),
            self._make_room(),
        )
        working = [asyncio.create_task(self._guard(part)) for part in work]
        await self._over.wait()
        await cancelled(working)
        self._write_record()
        if self._session.samples is not None:
            self._session.samples.close()
        why = "" if self._failure is None or isinstance(self._failure, Interrupted) else f"the run has failed: {self._failure}"
        order = EngineOrder(finished=not why, why=why)
        await self._fleet.close()
        await asyncio.gather(asyncio.sleep(_LAST_WORDS_S), self._lifecycle.membership.end(order))
        await cancelled([serving])
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        if self._failure is not None:
            raise self._failure

    async def _guard(self, part: Coroutine[Any, Any, None]) -> None:
        """Run a part; if it fails, pass the failure to all waiters and end the run."""
        try:
            await part
        except Exception as error:
            if self._trained.is_set() and isinstance(error, EngineError):
                log.warning("an engine failed after the last step: %s", error)  # only the last evaluation needs engines
                self._coordinator.engines_failed(error)
                return
            self._failure = self._failure or error
            told = error if isinstance(error, AsyncmoeError) else AsyncmoeError(f"the controller has failed: {error}")
            self._coordinator.engines_failed(told)
            if self._session.queue is not None:
                self._session.queue.fail(told)
            self._over.set()
            raise

    async def _demonstrate(self) -> None:
        queue, warmup = await self._session.joined(), self._config.warmup
        while True:
            back = self._session.went_back
            first, total = queue.trained_steps * warmup.batch, warmup.steps * warmup.batch
            await demonstrate(queue, self._fleet.show, first, total, back.is_set)
            await back.wait()

    async def _produce(self) -> None:
        await self._coordinator.wait_started()
        queue = await self._session.joined()
        await self._served.wait()
        freeze()
        config, samples = self._config, self._session.samples
        rollout = config.rollout
        if samples is not None:
            self._fleet.sampled = samples.noted
        producer = Producer(
            queue,
            self._task,
            self._fleet,
            rollout.group_size,
            filter_equal=rollout.filter_equal,
            start_over=config.scoring.start_over,
            samples=samples,
            max_rejected=rollout.max_rejected_share,
        )
        async with first_of(producer.run(), self._trained.wait()) as (producing, _):
            if producing.done():
                producing.result()

    async def _evaluated(self, asked: Evaluations) -> Evaluated:
        known = self._evaluator.known(asked.version)
        ended = known or self._stopping or await self._evaluator.ended(asked.wait_s)
        if not ended and asked.wait_s and not self._pool.serving:  # an engine that returns gets no weights any more
            log.warning("version %d, the last, is not evaluated: no engine has it any more", asked.version)
            ended = True
        return Evaluated(known, ended)

    async def _record(self) -> None:
        while True:
            await asyncio.sleep(_RECORD_S)
            heartbeats.beat("serves requests")
            self._write_record()

    async def _make_room(self) -> None:
        """Record fewer steps when the log lacks room."""
        while self._config.log.keep is not None:
            await asyncio.sleep(_RECORD_S)
            if self._session.queue is not None and await self._run_log.shrink():
                await self._retain()

    def _write_record(self) -> None:
        if (queue := self._session.queue) is not None:
            names, figures = [member.engine.name for member in self._pool.members], self._fleet.figures()
            self._recorder.write(
                queue.version,
                queue.accounts,
                names,
                self._pool,
                scoring=figures.scoring,
                tools=figures.tools,
                engines_serving=len(self._pool.serving),
                engines_lost=self._lifecycle.lost(),
                engines_missing=self._lifecycle.missing(),
                workers_lost=self._fleet.times_lost,
                workers_missing=len(self._fleet.lost()),
            )

    async def _published(self, version: int) -> None:
        assert self._session.queue is not None
        self._session.queue.set_version(version)
        self._served.set()
        self._evaluator.published(version)

    def _go_on(self, version: int) -> None:
        self._served.set()
        if not self._evaluator.known(version):  # the previous controller may have finished it
            self._evaluator.published(version)

    def _unfinished(self) -> int:
        """Trajectories that must finish before a version lands: in one_step_off, where versions land between batches, all running ones."""
        queue = self._session.queue
        return queue.ledger.running if queue is not None and self._config.run.mode == "one_step_off" else 0

    def _interrupt(self) -> None:
        if (queue := self._session.queue) is None:
            self._failure = self._failure or Interrupted("stopped before the trainer joined")
            self._over.set()
        elif self._stopping:
            self._over.set()
        else:
            self._stopping = True
            log.info("asking the trainer to save and stop")
            queue.stop()
            self._coordinator.stop()
