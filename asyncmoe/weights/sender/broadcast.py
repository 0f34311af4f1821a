"""Publish a weight version by broadcast: works with any engine, and is the baseline for the `reshard` path.

Megatron's shards are gathered to rank 0, one bucket of Hugging Face tensors at a time, and rank 0 broadcasts each bucket to every
engine rank in SGLang's flattened form. The first bucket is gathered before the engines are paused. The controller drives the
engines (`asyncmoe.weights.coordinator`); this side only moves bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, RunStopping, WaitTimeout, WeightSyncError
from asyncmoe.reshard import device_threads
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.messages import (
    Committed,
    Engines,
    EnginesAsk,
    Reply,
    Request,
    WeightsAbort,
    WeightsBegin,
    WeightsBucket,
    WeightsCommit,
    WeightsJoin,
)
from asyncmoe.trajectory import Buffer
from asyncmoe.weights.receiver import failing, hosting
from asyncmoe.weights.sender import broadcast_group
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.gather import Gatherer
from asyncmoe.weights.sender.publisher import Checksums, Published, Publisher
from asyncmoe.weights.sender.trained import TrainerRank

_GROUP = "asyncmoe_weights"
T = TypeVar("T")


class BroadcastPublisher(Publisher):
    """See `Publisher`.

    Args:
        gatherer: gathers the weights to rank 0.
        client: connection to the controller; used on rank 0 only.
    """

    def __init__(
        self,
        config: Config,
        gatherer: Gatherer,
        client: Client,
        mesh: TrainerRank,
        expected: ExpectedChecksums,
    ) -> None:
        self._sync, self._gatherer, self._client, self._mesh = config.sync, gatherer, client, mesh
        self._expected = expected
        self._start_timeout_s = config.engines.start_timeout_s
        self._group: dist.ProcessGroup | None = None
        self._hosted: hosting.Hosted | None = None  # where the group met; must live as long as the group
        self._roster = 0
        self._network = config.cluster.network
        self._threads = device_threads.pool(str(mesh.device), 2, "weights")
        self._asked: Future[tuple[Reply, list[Buffer]]] | None = None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def publish(self, version: int) -> Published:
        """Publish a version; return when every engine has resumed with it.

        Raises:
            WeightSyncError: an engine refused the version or its checksums differ; engines that have part of the version are fenced.
            Disagreement: the checksums of all engines differ.
            WaitTimeout: an engine or the controller did not answer in time.
            RunStopping: on rank 0, if the run is stopped before engines have started.
        """
        begin = time.perf_counter()
        checksums = self._expected.of_next()
        if self._mesh.rank != 0:
            self._only_gather()
            return Published(version, time.perf_counter() - begin, 0.0)
        try:
            group = self._join()
        except RunStopping:
            self._only_gather()  # the other ranks are gathering
            raise
        try:
            committed = self._send(version, group, checksums)
        except Exception as error:
            where = f"(trainer rank {self._mesh.rank} on {failing.where(self._mesh.device)})"
            why = str(error) if isinstance(error, AsyncmoeError) else f"{failing.in_one_line(error)} {where}"
            # The connection carries one request at a time; if one is still open, the controller notices the silence instead.
            if self._asked is None or self._asked.done():
                self._client.ask(WeightsAbort(version, why), self._sync.timeout_s)
            if isinstance(error, AsyncmoeError):
                raise
            raise WeightSyncError(why) from error
        return Published(version, time.perf_counter() - begin, max(committed.pause_ms, default=0.0))

    def _only_gather(self) -> None:
        for _ in self._gatherer.run():
            pass

    def _send(self, version: int, group: dist.ProcessGroup, checksums: Checksums) -> Committed:
        for number, (bucket, flat) in enumerate(self._gatherer.run()):
            assert flat is not None
            if number == 0:
                self._client.ask(WeightsBegin(version), self._sync.timeout_s)
            message = WeightsBucket(version, bucket.names, bucket.dtypes, bucket.shapes)
            self._ask_while(message, partial(dist.broadcast, flat.view(torch.uint8), src=0, group=group))
        reply = self._client.ask(WeightsCommit(version, checksums), self._sync.timeout_s)[0]
        assert isinstance(reply, Committed)
        return reply

    def _join(self) -> dist.ProcessGroup:
        """Return the process group with the current engines, or make a new one if the roster has changed."""
        engines = self._client.ask(EnginesAsk(self._start_timeout_s), self._start_timeout_s + 10)[0]
        assert isinstance(engines, Engines)
        if self._group is not None and engines.roster == self._roster:
            return self._group
        backend: Literal["gloo", "nccl"] = "nccl" if self._mesh.backend == "nccl" else "gloo"
        if self._group is not None:
            former, self._group = self._group, None
            broadcast_group.leave(former, backend)
        hosted, name = hosting.host(self._network), f"{_GROUP}.{engines.roster}"
        host, port = hosting.place(hosted)
        join = partial(broadcast_group.join, hosted, engines.world, name, backend, self._sync.timeout_s)
        self._group = group = self._ask_while(WeightsJoin(host, port, name, backend), join)
        self._roster, self._hosted = engines.roster, hosted
        return group

    def _ask_while(self, request: Request, act: Callable[[], T]) -> T:
        """Send a request to the controller and meanwhile run `act`, this side's part of the collective; return the result of `act`.

        The first of the two to fail decides: if an engine refuses, it never joins the collective and `act` would hang; if `act` fails,
        the engines hang until the controller's own timeout.
        """
        self._asked = self._threads.submit(self._client.ask, request, self._sync.timeout_s)
        acting = self._threads.submit(act)
        both: list[Future[Any]] = [self._asked, acting]
        done, running = wait(both, timeout=self._sync.timeout_s + ANSWER_S, return_when=FIRST_EXCEPTION)
        for future in done:
            error = future.exception()
            if isinstance(error, RuntimeError):  # from torch.distributed
                raise WeightSyncError(f"{type(request).__name__}: {error}") from error
            if error is not None:
                raise error
        if running:
            raise WaitTimeout("the engines", type(request).__name__, self._sync.timeout_s)
        return acting.result()
