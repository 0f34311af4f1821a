"""Publish a weight version shard to shard: every engine rank receives its bytes directly from the trainer ranks that hold them.

Every trainer rank sends from a background thread to receivers inside the engines (`asyncmoe.weights.receiver`), which stage the weights
while the engines generate and the trainer computes its next step; only the optimizer update waits until the weights are sent. Once all
bytes have arrived and their digests match, the controller pauses every engine to swap (`asyncmoe.weights.coordinator`). No parameter
is written before that, so a failure leaves the engines with the version they serve.

Each version goes to the engines present when it begins; if the set has changed, all ranks meet again. If an engine dies during a
transfer, the version is sent again to the remaining engines, or if none remains, to those that start again. It is also sent again if all
engines that received it are gone and new ones have joined: without a version these generate nothing, and the trainer would never publish
another. If the next optimizer step is already changing the weights, the version is abandoned instead; the version after that step goes to
all engines present.

Where a GPU has no room for a second copy of its shard, engines are paused for the whole transfer of a full update, and an engine that holds
a part of a failed version is fenced. With `sync.delta`, updates are deltas where that is supported; a version whose delta an engine rank
refuses is sent again in full, or if the weights are already changing, abandoned for the next.

With `train: lora` only the adapter is sent, into the engines' adapter memory, from a copy, so the optimizer never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import torch

from asyncmoe.config import Config
from asyncmoe.config.transports import transport_for
from asyncmoe.errors import AsyncmoeError
from asyncmoe.rpc.client import Client
from asyncmoe.weights.receiver.channel import SideStream
from asyncmoe.weights.receiver.channel_end import opener
from asyncmoe.weights.sender.adapter_copy import AdapterCopy
from asyncmoe.weights.sender.background import BackgroundPublisher
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.publisher import Checksums, Published
from asyncmoe.weights.sender.rendezvous import Meeting, NotMet, changed, in_all, meet, part
from asyncmoe.weights.sender.sender import Sender
from asyncmoe.weights.sender.trained import TrainedModel

log = logging.getLogger(__name__)


class ReshardPublisher(BackgroundPublisher):
    """See `asyncmoe.weights.sender.publisher.Publisher`.

    Args:
        client: as for `BackgroundPublisher`.

    Raises:
        ConfigError: a setting this path does not support.
    """

    def __init__(self, config: Config, model: TrainedModel, client: Client, expected: ExpectedChecksums) -> None:
        opener(transport_for(config.sync.transport, model.mesh.backend == "nccl", shared=config.engines.share_gpus))
        super().__init__(config, model, client, expected)
        self._snapshot = None if model.adapter is None else AdapterCopy(model.adapter_values(), model.adapter.scale)
        self._sender: Sender | None = None
        self._side = SideStream(model.mesh.device) if model.mesh.device.type == "cuda" else None
        self._hold = threading.Lock()
        self._changing = False  # the weights may change, so the version cannot be sent again

    def wait_sent(self) -> None:
        if self._snapshot is None:
            super().wait_sent()

    def close(self) -> None:
        self._disperse()
        if self._side is not None:
            self._side.communicators.close()

    def _prepare(self) -> None:
        if self._snapshot is not None:
            self._snapshot.take()
        else:
            super()._prepare()
        if self._side is not None:
            self._side.follow()
        self._changing = False

    def _let_go(self) -> bool:
        with self._hold:
            self._changing = self._sent.is_set()  # else the version is being sent again
            return self._changing

    def _publish(self, version: int, expected: Checksums) -> Published | None:
        """Send the version until it needs no further attempt; return None if it was abandoned."""
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
            except AsyncmoeError as error:
                sender.leave()
                if not sender.doubted and not self._others(sender.met.roster):
                    raise
                why = str(error)
            again = self._still_has()
            happened = "the delta is refused" if sender.doubted else "engines changed"
            then = "sending it again to the current engines" if again else "the current engines get the next version"
            log.warning("%s during version %d; %s: %s", happened, version, then, why)
            if not again:
                return published

    def _still_has(self) -> bool:
        """Return whether all ranks still hold the weights of the version under way; if so, `wait_sent` blocks until they are sent."""
        with self._hold:
            here = not self._changing
            if here:
                self._sent.clear()
        return in_all(self._group, here)

    def _together(self) -> Sender:
        """Return a sender to the current engines; meet them first if the set has changed."""
        if self._sender is not None and changed(self._config, self._model, self._client, self._group, self._sender.met.roster):
            log.info("engines changed; starting a new rendezvous")
            self._disperse()
        while self._sender is None:
            if (met := self._meet()) is not None:
                self._sender = Sender(self._config, self._model, self._client, met, self._tensors, self._side, self._sent)
        return self._sender

    def _others(self, roster: int) -> bool:
        """Return whether the set of engines differs from `roster`, once a lost engine has been noticed."""
        return changed(self._config, self._model, self._client, self._group, roster, probe=True)

    def _meet(self) -> Meeting | None:
        """Meet the engines; return None if an expected engine is gone, so that the remaining ones can be tried."""
        try:
            return meet(self._config, self._model, self._client, self._group)
        except NotMet as error:
            if not self._others(error.roster):
                raise
            log.warning("retrying the rendezvous with the remaining engines: %s", error)
            return None

    def _disperse(self) -> None:
        if self._sender is not None:
            self._sender.leave()
            part(self._sender.met.store, self._model)
        self._sender = None

    @property
    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return super()._tensors if self._snapshot is None else self._snapshot.tensors
