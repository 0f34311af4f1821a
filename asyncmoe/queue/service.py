"""The queue's end of the protocol between trainer and controller."""

from __future__ import annotations

from asyncmoe.errors import ProtocolError
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rpc.messages import Commit, Done, Goodbye, Hello, Lease, Reply, Saved, Welcome
from asyncmoe.rpc.peers import check_digest

QueueRequest = Hello | Lease | Commit | Saved | Goodbye


class QueueService:
    """Answers every `QueueRequest` from one start of the trainer.

    Args:
        config_digest: `Config.digest` that all ranks must have; a rank with a different digest is refused.

    Attributes:
        left: whether every rank has sent `Goodbye`.
    """

    def __init__(self, queue: BoundedQueue, *, config_digest: str) -> None:
        self._queue, self._digest = queue, config_digest
        self._world: int | None = None
        self._finished: dict[int, bool] = {}
        self.left = False

    async def __call__(self, request: QueueRequest) -> Reply:
        """Answer a request. Raises the queue's errors; `ConfigError`: a different configuration; `ProtocolError`: it is out of turn."""
        match request:
            case Hello():
                return self._welcome(request)
            case Lease():
                if request.version > request.step:  # each step makes one version, so a higher one would discard fresh groups
                    raise ProtocolError(f"lease of step {request.step}: got version {request.version}, expected at most {request.step}")
                return await self._queue.lease(request.step, request.phase, request.count, request.version, request.wait_s)
            case Commit():
                self._queue.commit(request.step, request.dropped)
                # Whatever a rank knows to be committed, the next controller must know too.
                await self._queue.log.settled()
            case Goodbye():
                self._goodbye(request)
        return Done()

    def _welcome(self, hello: Hello) -> Welcome:
        check_digest("the trainer", hello.config_digest, self._digest)
        if self._world is None:
            self._world = hello.world
        if hello.world != self._world or not 0 <= hello.rank < hello.world:
            raise ProtocolError(f"hello: got rank {hello.rank} of {hello.world}, expected rank 0 to {self._world - 1} of {self._world}")
        trained = self._queue.trained_steps
        if hello.step != trained:
            counts = f"rank {hello.rank} has taken {hello.step} steps, the controller counts {trained}"
            raise ProtocolError(f"hello: {counts}; restart the controller and the trainer")
        return Welcome(self._queue.version)

    def _goodbye(self, goodbye: Goodbye) -> None:
        if self._world is None or not 0 <= goodbye.rank < self._world:
            got = f"rank {goodbye.rank} of {self._world or 'a trainer that sent no Hello'}"
            raise ProtocolError(f"goodbye: got {got}, expected a rank that sent Hello")
        self._finished[goodbye.rank] = goodbye.finished
        if len(set(self._finished.values())) > 1:
            raise ProtocolError(f"goodbye: rank {goodbye.rank} sent finished={goodbye.finished}, another rank sent the opposite")
        self.left = len(self._finished) == self._world
