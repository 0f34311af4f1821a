"""The controller's state for its trainer, from the first `Hello` on, and how each `Hello` changes it.

The first start of the trainer creates the queue, which resumes from the log. A later start, after the trainer was lost, sets the same queue
back to a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from asyncmoe.config import Config
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import ProtocolError
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.service import QueueService
from asyncmoe.rollout.pieces import Pieces
from asyncmoe.rollout.run_log import RunLog
from asyncmoe.rollout.samples import Samples, samples_of
from asyncmoe.rollout.tasks import Tasks
from asyncmoe.rpc.environment import trainer_epoch
from asyncmoe.rpc.messages import Hello, TrainerMessage, TurnAwaited
from asyncmoe.rpc.peers import check, check_digest, facts
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator

log = logging.getLogger(__name__)


class TrainerSession:
    """Admits each start of the trainer once, when the first of its ranks says hello.

    Attributes:
        queue, service, samples: None until the first start is admitted. The queue's versions and counts continue from the steps that the
            trainer reports; each start gets a new service; samples stay None if none are kept.
        went_back: event, set and then replaced when a later start is admitted, which trains again from a checkpoint.

    Args:
        taken: set once it is known which engines of the previous controller keep their weights.
        serve: called with the version that those engines serve, once the queue has that version.
        freed: as `on_freed` of `BoundedQueue`.
    """

    def __init__(
        self,
        config: Config,
        asked: Tasks,
        run_log: RunLog,
        pool: Pool,
        coordinator: WeightUpdateCoordinator,
        taken: asyncio.Event,
        serve: Callable[[int], None],
        freed: Callable[[Sequence[int]], None],
    ) -> None:
        self._freed = freed
        self._config, self._tokenizer, self._run_log = config, asked.tokenizer, run_log
        self._pool, self._coordinator, self._taken, self._serve = pool, coordinator, taken, serve
        self.queue: BoundedQueue | None = None
        self.service: QueueService | None = None
        self.samples: Samples | None = None
        # Epochs grow with each restart of the trainer in place; a leftover rank of an older start may say hello first.
        self._newest, self._served = trainer_epoch() or -1, -1
        """Epochs of the newest trainer known and of the one served; -1: none. They differ while the newest is being admitted."""
        self.went_back = asyncio.Event()
        self._met, self._meeting = asyncio.Event(), asyncio.Lock()

    def check(self, request: TrainerMessage) -> None:
        """Refuse all requests except those of the trainer that is served, and the `Hello` of the next trainer.

        Raises:
            ProtocolError: the request is an older trainer's, or comes before its trainer's `Hello`.
        """
        name, epoch = type(request).__name__, request.epoch
        if epoch < self._newest:
            raise ProtocolError(
                f"{name}: sent by the trainer started as number {epoch}, but number {self._newest} has taken its place: "
                "this process is left over and must end"
            )
        if not isinstance(request, Hello | TurnAwaited) and self._served >= 0 and epoch != self._served:
            raise ProtocolError(f"{name}: sent before Hello by the trainer started as number {epoch}, expected Hello first")

    async def joined(self) -> BoundedQueue:
        """Return the queue once the first start is admitted."""
        await self._met.wait()
        assert self.queue is not None
        return self.queue

    async def greet(self, hello: Hello) -> None:
        """Admit a start of the trainer, unless another of its ranks has already done so.

        Raises:
            UserError: it has another configuration, clock or version of asyncmoe, or its checkpoint is not the log's.
            ProtocolError: it is an older start, or its number of steps contradicts the log or the queue.
            AsyncmoeError: engines did not finish the lost trainer's requests.
        """
        check(facts("controller"), hello.facts)
        async with self._meeting:
            self.check(hello)  # a newer start may have been admitted meanwhile
            if hello.epoch == self._served:
                return
            if self.queue is None:
                await self._meet(hello)
            else:
                await self._meet_again(hello, self.queue)
            self._newest = self._served = hello.epoch

    async def _meet(self, hello: Hello) -> None:
        config, run_log = self._config, self._run_log
        check_digest("the trainer", hello.config_digest, config.digest)
        await self._taken.wait()
        (resumed, queued), staleness = await run_log.resume(hello.step, hello.same), config.queue.staleness
        weighing = staleness.rule, staleness.downweight or 1.0, staleness.drop_above
        queue = BoundedQueue(
            Admission(config.rollout.batch, staleness.max_staleness, config.warmup.steps, *weighing),
            run_log.queue_log,
            capacity=config.queue_capacity,
            group_size=config.rollout.group_size,
            trained_steps=hello.step,
            demonstrations=2 * config.warmup.batch if config.warmup.steps else 0,
            on_stale=self._stale,
            on_freed=self._freed,
            resumed=resumed,
            queued=queued,
        )
        service = QueueService(queue, config_digest=config.digest)
        await service(hello)
        self.queue, self.service = queue, service
        self.samples = samples_of(config, Pieces(self._tokenizer), hello.step)
        self._pool.lineage = run_log.queue_log.history
        if self._coordinator.driver.landed and self._pool.serving:  # engines that were taken over
            queue.set_version(self._pool.version)
            self._serve(self._pool.version)
        self._met.set()

    async def _meet_again(self, hello: Hello, queue: BoundedQueue) -> None:
        """Serve a trainer that was restarted in place after the previous one was lost. Engines and producer keep running."""
        config = self._config
        check_digest("the trainer", hello.without_layout, config.digest_without_layout)  # its parallel layout may differ
        if (taken := hello.step) > (counted := queue.trained_steps):
            counts = f"the trainer has taken {taken} steps, the controller counts {counted}"
            raise ProtocolError(f"hello: {counts}; restart the controller and the trainer")
        log.warning("the trainer was lost, and started again (start %d): it goes on from step %d", hello.epoch, hello.step)
        self._newest = hello.epoch
        queue.trainer_lost()
        await self._coordinator.forget_sender("the trainer was lost")
        self._pool.lineage = self._run_log.reopen(queue, hello.step, hello.same)
        went_back, self.went_back = self.went_back, asyncio.Event()
        went_back.set()
        self.service = QueueService(queue, config_digest=hello.config_digest)

    def _stale(self, groups: Sequence[Group], requeued: bool, version: int) -> None:
        if self.samples is not None:
            self.samples.stale(groups, requeued, version)
