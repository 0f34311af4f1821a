"""Publish versions from a thread, while the trainer computes its next step: what is the same however they reach the engines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ConfigError, WaitTimeout, WeightSyncError
from asyncmoe.models import engine_dtype
from asyncmoe.process import yield_cores
from asyncmoe.reshard import device_threads
from asyncmoe.rpc.client import Client
from asyncmoe.telemetry import heartbeats
from asyncmoe.weights.receiver import failing
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.publisher import Checksums, Published
from asyncmoe.weights.sender.rendezvous import GRACE_S
from asyncmoe.weights.sender.sender import LOOK_S
from asyncmoe.weights.sender.sources import WeightSources
from asyncmoe.weights.sender.trained import TrainedModel

log = logging.getLogger(__name__)


class BackgroundPublisher:
    """A `asyncmoe.weights.sender.publisher.Publisher` whose `_publish` runs in a thread of its own.

    Args:
        client: connection to the controller, not shared with other threads; used on rank 0 only.

    Raises:
        ConfigError: engines serve a dtype that the trainer's weights do not become on the way.
    """

    def __init__(self, config: Config, model: TrainedModel, client: Client, expected: ExpectedChecksums) -> None:
        self._config, self._sync, self._model, self._client = config, config.sync, model, client
        self._rank = model.mesh.rank
        _check_dtypes(config, model)
        self._expected = expected
        # For the sending thread only: the trainer's main thread uses other groups at the same time.
        wait_s = config.engines.start_timeout_s + 2 * self._limit
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        self._running: Future[Published | None] | None = None
        self._tried = 0.0  # start of the latest attempt to send the version under way, or of `settle`
        self._settling = threading.Event()  # `settle` was called: the version is not to be sent again to new engines
        self._sent = threading.Event()
        self._sent.set()  # nothing is under way

    def begin(self, version: int) -> None:
        expected = self._expected.of_next()
        self._prepare()
        self._tried = time.monotonic()
        self._sent.clear()
        self._settling.clear()
        self._running = Future()
        result = self._running

        def failed(error: Exception) -> None:
            self._sent.set()
            result.set_exception(self._in_words(error))

        device_threads.start(str(self._model.mesh.device), "weights", lambda: self._run(result, version, expected), failed)

    def check(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()

    def wait_sent(self) -> None:
        while True:
            # Sending is bounded, and the sending thread sets `_sent` even if it fails, so this timeout means that the bound was broken.
            while not self._sent.wait(LOOK_S):
                self._bounded("its part of the version under way to be sent")
            if self._let_go():
                return

    def settle(self) -> Published | None:
        if self._running is None:
            return None
        self._tried = time.monotonic()
        self._settling.set()
        while not wait([self._running], LOOK_S).done:
            self._bounded("all engines to serve the new version")
        running, self._running = self._running, None
        return running.result()

    def close(self) -> None:
        raise NotImplementedError

    def _publish(self, version: int, expected: Checksums) -> Published | None:
        """Publish a version, in the thread; None if it was abandoned. Set `_sent` when the weights may change."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Bring up to date what is to be sent. In the trainer's main thread, before the sending one starts."""
        self._sources.refresh()

    def _let_go(self) -> bool:
        """Return whether the weights may change from now on, given that they are sent."""
        return True

    @property
    def _limit(self) -> float:
        """Seconds one attempt to publish a version, or one rendezvous, may take."""
        return 4 * (self._sync.timeout_s + GRACE_S)

    def _bounded(self, what: str) -> None:
        heartbeats.beat(f"waiting for {what}")
        limit = self._config.engines.start_timeout_s + 2 * self._limit
        if time.monotonic() - self._tried > limit:
            raise WaitTimeout("this rank's sender of weights", what, limit)

    def _run(self, result: Future[Published | None], version: int, expected: Checksums) -> None:
        yield_cores()  # sending may take as long as a whole training step; the step itself must not be slowed down
        published = self._publish(version, expected)
        self._sent.set()
        result.set_result(published)

    def _in_words(self, error: Exception) -> WeightSyncError:
        """Convert the sending thread's error into one for the trainer's main thread."""
        if isinstance(error, WeightSyncError):
            return error
        if isinstance(error, AsyncmoeError):
            return WeightSyncError(str(error))  # the message the other ranks received
        log.error("sending weights", exc_info=error)
        made = WeightSyncError(f"{failing.in_one_line(error)} (trainer rank {self._rank} on {failing.where(self._model.mesh.device)})")
        made.__cause__ = error
        return made

    @property
    def _tensors(self) -> Mapping[str, torch.Tensor]:
        """What is sent, by the names of the rank's storages."""
        return self._sources.tensors

    @cached_property
    def _sources(self) -> WeightSources:
        return WeightSources(self._model)


def _check_dtypes(config: Config, model: TrainedModel) -> None:
    ours, theirs = str(model.dtype).removeprefix("torch."), engine_dtype(model.hf, config.engines)
    if theirs not in (ours, "bfloat16"):
        hint = f"set engines.dtype={ours} or sync.method=broadcast"
        raise ConfigError("engines.dtype", got=theirs, expected=f"the trainer's {ours}, or bfloat16", hint=hint)
