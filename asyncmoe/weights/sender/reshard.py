"""Publish a weight version shard to shard: every engine rank receives its bytes directly from the trainer ranks that have them.

Every trainer rank sends from a background thread to receivers inside the engines (`asyncmoe.weights.receiver`), which stage the weights
while the engines generate and the trainer computes its next step; only the optimizer update waits until the weights are sent. Once all
bytes have arrived and their digests match, the controller pauses every engine to swap (`asyncmoe.weights.coordinator`). No parameter
is written before that, so a failure leaves the engines with the version they serve.

Each version goes to the engines present when it begins; if the set has changed, all ranks meet again. If an engine dies during a transfer,
the version is resent to the remaining engines, or if none remains, to those that restart. It is also resent if all engines that received it
are gone and new ones have joined: without a version these generate nothing, and the trainer would never publish another. If the next
optimizer step is already changing the weights, the version is abandoned instead; the version after that step goes to all engines present.

If a GPU has no room for a second copy of its shard, engines are paused for the whole transfer of a full update, and an engine that has part
of a failed version is fenced. With `sync.delta`, updates are deltas where supported; a version whose delta an engine rank refuses is resent
in full, or, if the weights are already changing, abandoned for the next.

With `train: lora` only the adapter is sent, into the engines' adapter memory, from a copy, so the optimizer never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.config.transports import transport_for
from asyncmoe.errors import AsyncmoeError, ConfigError, Disagreement, WaitTimeout, WeightSyncError
from asyncmoe.models import engine_dtype
from asyncmoe.process import yield_cores
from asyncmoe.reshard import device_threads
from asyncmoe.rpc.client import Client
from asyncmoe.telemetry import heartbeats
from asyncmoe.weights.receiver import failing
from asyncmoe.weights.receiver.channel import SideStream
from asyncmoe.weights.receiver.channel_end import opener
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.publisher import Checksums, Published, Publisher
from asyncmoe.weights.sender.rendezvous import GRACE_S, NotMet, TrainerRanks
from asyncmoe.weights.sender.sender import LOOK_S, Sender
from asyncmoe.weights.sender.sources import AdapterSources, WeightSources
from asyncmoe.weights.sender.trained import TrainedModel

log = logging.getLogger(__name__)


class ReshardPublisher(Publisher):
    """See `Publisher`. A separate thread sends each version (`_publish`).

    Args:
        client: connection to the controller, not shared with other threads; used on rank 0 only.

    Raises:
        ConfigError: a setting is unsupported here, or engines serve a dtype to which the trainer's weights are not cast on the way.
    """

    def __init__(self, config: Config, model: TrainedModel, client: Client, expected: ExpectedChecksums) -> None:
        opener(transport_for(config.sync.transport, model.mesh.backend == "nccl", shared=config.shares_gpus))
        _check_dtypes(config, model)
        self._config, self._model, self._expected = config, model, expected
        # For the sending thread only: the trainer's main thread uses other groups at the same time.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.engines.start_timeout_s + 2 * self._limit))
        self._ranks = TrainerRanks(config, model, client, group)
        self._side = SideStream(model.mesh.device)
        self._sender: Sender | None = None
        self._running: Future[Published | None] | None = None
        self._tried = 0.0  # start of the latest attempt to send the version, or of `settle`
        self._settling = threading.Event()  # `settle` was called: do not resend the version to new engines
        self._sent = threading.Event()
        self._sent.set()  # nothing is being sent
        self._hold = threading.Lock()
        self._changing = False  # the weights may change, so the version cannot be resent

    def begin(self, version: int) -> None:
        expected = self._expected.of_next()
        self._sources.refresh()
        self._side.follow()
        self._changing = False
        self._tried = time.monotonic()
        self._sent.clear()
        self._settling.clear()
        self._running = device_threads.pool(str(self._model.mesh.device), 1, "weights").submit(self._send, version, expected)

    def check(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()

    def starving(self) -> bool:
        return self._ranks.starving()

    def wait_sent(self) -> None:
        if self._model.adapter is not None:
            return  # an adapter is sent from a copy
        while True:
            # Sending is bounded, and the sending thread sets `_sent` even if it fails, so a timeout here means that the bound was broken.
            while not self._sent.wait(LOOK_S):
                self._bounded("its part of the version under way to be sent")
            with self._hold:
                self._changing = self._sent.is_set()  # else the version is being resent
                if self._changing:
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

    @cached_property
    def _sources(self) -> WeightSources | AdapterSources:
        adapter = self._model.adapter
        return WeightSources(self._model) if adapter is None else AdapterSources(self._model.adapter_values(), adapter.scale)

    @property
    def _limit(self) -> float:
        """Maximum seconds for one attempt to publish a version, or for one rendezvous."""
        return 4 * (self._config.sync.timeout_s + GRACE_S)

    def _bounded(self, what: str) -> None:
        heartbeats.beat(f"waiting for {what}")
        limit = self._config.engines.start_timeout_s + 2 * self._limit
        if time.monotonic() - self._tried > limit:
            raise WaitTimeout("this rank's sender of weights", what, limit)

    def _send(self, version: int, expected: Checksums) -> Published | None:
        """Publish a version in the sending thread.

        Raises:
            WeightSyncError: in the words that the other ranks received, or with this rank's place.
            Disagreement: engines have other weights; raised on rank 0.
        """
        yield_cores()  # sending may take a whole training step, which it must not slow down
        try:
            return self._publish(version, expected)
        except (WeightSyncError, Disagreement):
            raise
        except AsyncmoeError as error:
            raise WeightSyncError(str(error)) from error
        except Exception as error:
            log.error("sending weights failed", exc_info=error)
            mesh = self._model.mesh
            raise WeightSyncError(f"{failing.in_one_line(error)} (trainer rank {mesh.rank} on {failing.where(mesh.device)})") from error
        finally:
            self._sent.set()

    def _publish(self, version: int, expected: Checksums) -> Published | None:
        """Send the version until no further attempt is needed; return None if it was abandoned."""
        published: Published | None = None
        while True:
            self._tried = time.monotonic()
            sender = self._together()
            begin = time.perf_counter()
            try:
                pause_ms = sender.send(version, expected)
                published = Published(version, time.perf_counter() - begin, pause_ms, sender.traffic)
                why = "all its engines are gone"
                if not sender.needed_again(self._settling):
                    return published
            except Disagreement:  # on rank 0, whose end ends the other ranks
                raise
            except AsyncmoeError as error:
                sender.leave()
                if not sender.doubted and not self._ranks.changed(sender.met.roster, probe=True):
                    raise
                why = str(error)
            again = self._still_has()
            happened = "the delta is refused" if sender.doubted else "engines changed"
            then = "sending it again to the current engines" if again else "the current engines get the next version"
            log.warning("%s during version %d; %s: %s", happened, version, then, why)
            if not again:
                return published

    def _still_has(self) -> bool:
        """Return whether all ranks still have the version's weights; if so, `wait_sent` blocks until they are sent."""
        with self._hold:
            here = not self._changing
            if here:
                self._sent.clear()
        return self._ranks.in_all(here)

    def _together(self) -> Sender:
        """Return a sender to the current engines; if the set has changed, meet them first."""
        if self._sender is not None and self._ranks.changed(self._sender.met.roster):
            log.info("engines changed; starting a new rendezvous")
            self.close()
        while self._sender is None:
            try:
                self._sender = Sender(self._ranks, self._ranks.meet(), self._sources.tensors, self._side, self._sent)
            except NotMet as error:
                if not self._ranks.changed(error.roster, probe=True):
                    raise
                log.warning("retrying the rendezvous with the remaining engines: %s", error)
        return self._sender

    def close(self) -> None:
        if self._sender is not None:
            self._sender.leave()
            self._ranks.part(self._sender.met.store)
        self._sender = None


def _check_dtypes(config: Config, model: TrainedModel) -> None:
    ours, theirs = str(model.dtype).removeprefix("torch."), engine_dtype(model.hf, config.engines)
    if theirs not in (ours, "bfloat16"):
        hint = f"set engines.dtype={ours} or sync.method=broadcast"
        raise ConfigError("engines.dtype", got=theirs, expected=f"the trainer's {ours}, or bfloat16", hint=hint)
