"""Send weight versions to the engines of one meeting, and decide when a version must be sent again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import torch

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, WaitTimeout, WeightSyncError
from asyncmoe.receiver import channel, failing, protocol
from asyncmoe.receiver.channel import SideStream
from asyncmoe.receiver.protocol import Header, Outcome, Over
from asyncmoe.reshard import Exchanger
from asyncmoe.reshard.transport import nothing_to_watch
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Committed, Reply, Request, WeightsAbort, WeightsCommit, WeightsStage
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.trainer.weight_sync.publisher import Expected
from asyncmoe.trainer.weight_sync.rendezvous import GRACE_S, Meeting, starving, watch

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Polling interval while waiting."""
_PATIENCE_S = 60.0


class Sender:
    """One rank's part. All ranks make the same calls in the same order, each from one thread.

    Args:
        client: connection to the controller; used on rank 0 only.
        tensors: the tensors to send, by the names of the plan's storages.
        side: where to enqueue copies, if the weights are on GPUs.
        sent: set as soon as this rank has sent its part of an update and no longer reads `tensors`.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        client: Client,
        met: Meeting,
        tensors: Mapping[str, torch.Tensor],
        side: SideStream | None,
        sent: threading.Event,
    ) -> None:
        self.met, self._rank, self._is_sent, self._device = met, model.mesh.rank, sent, model.mesh.device
        self._config, self._sync, self._client, self._tensors, self._side = config, config.sync, client, tensors, side
        self._watch = watch(config, client)
        self._exchanger: Exchanger | None = None
        self._number = self._epoch = 0  # N of the update and E of the channel in `asyncmoe.receiver.protocol`

    def send(self, version: int, expected: Expected) -> float:
        """Send a version; return when every engine serves it.

        Args:
            expected: computes the checksums the engines must report; called on rank 0 after the transfer, before the commit.

        Returns:
            The longest pause of any engine in milliseconds, on rank 0; 0 on all other ranks.

        Raises:
            WeightSyncError, WaitTimeout: the update failed; raised on every rank.
        """
        self._number += 1
        if self._exchanger is None:
            self._epoch += 1
        try:
            return self._lead(version, expected) if self._rank == 0 else self._follow()
        except AsyncmoeError:
            raise  # this rank has already reported the failure, or received it from another
        except Exception as error:
            self.met.store.resign(self._number, failing.said(error, self.met.terms, self._rank, self._device))
            raise

    def needed_again(self, settling: threading.Event) -> bool:
        """Wait until the version is settled (False), or until all engines that received it are gone and new ones wait for it (True)."""
        store, key = self.met.store, protocol.over(self._number)
        if self._rank == 0:
            try:
                while not (over := settling.wait(LOOK_S)) and not starving(self._config, self._client):
                    pass
            except AsyncmoeError as error:
                store.put(key, Over(failure=str(error)))
                raise
            store.put(key, Over(not over))
            return not over
        while True:
            try:
                told = store.get(key, _PATIENCE_S)
            except WaitTimeout:
                continue
            Outcome(told.failure).check()
            return told.again

    def leave(self) -> None:
        """Close the channel; the next update connects a new one."""
        if self._exchanger is not None:
            self._exchanger.close()
        self._exchanger = None

    def _lead(self, version: int, expected: Expected) -> float:
        """Rank 0's part of an update; return the longest pause in milliseconds."""
        store, number = self.met.store, self._number
        if number > 2:
            store.forget(number - 2, self.met.terms)
        begun = False
        try:
            self._ask(WeightsStage(version, in_place=not self._sync.staging))
            store.put(protocol.header(number), Header(version, self._epoch))
            begun = True
            self._send_and_collect()
            committed = self._ask(WeightsCommit(version, expected(self.met.device), number))
        except Exception as error:
            failure = str(error) if isinstance(error, AsyncmoeError) else failing.said(error, self.met.terms, self._rank, self._device)
            if begun:
                store.put(protocol.end(number), Outcome(failure))
                self._ask(WeightsAbort(version, failure))
            else:
                store.put(protocol.header(number), Header(version, self._epoch, failure))
            raise
        store.put(protocol.end(number), Outcome())
        assert isinstance(committed, Committed)
        return max(committed.pause_ms)

    def _follow(self) -> float:
        """Every other rank's part of an update."""
        store, number, wait_s = self.met.store, self._number, self._sync.timeout_s + GRACE_S
        header = store.get(protocol.header(number), wait_s)
        Outcome(header.failure).check()
        self._send()
        store.get(protocol.end(number), 3 * wait_s).check()
        return 0.0

    def _send(self) -> None:
        """Send this rank's shards and report success or the failure. A failure is raised later, once rank 0 has collected all reports."""
        met, key = self.met, protocol.sent(self._number, self._rank)
        try:
            if self._exchanger is None:
                self._exchanger = channel.connect(
                    met.store,
                    met.terms,
                    met.plan,
                    self._epoch,
                    self._side,
                    self._watch if self._rank == 0 else nothing_to_watch,
                    arrays=lambda: (self._tensors, None),
                    update=lambda: self._number,
                )
            self._exchanger.run(met.terms.timeout_s)
        except Exception as error:
            met.store.fail(self._number, key, failing.said(error, met.terms, self._rank, self._device))
            if not isinstance(error, AsyncmoeError):
                log.exception("update %d of trainer rank %d", self._number, self._rank)
            self.leave()
        else:
            self._is_sent.set()
            met.store.put(key, Outcome())

    def _send_and_collect(self) -> None:
        """Send, and wait until all ranks have sent, or received and verified, their parts.

        Raises:
            WeightSyncError: a message was lost or corrupted; names the sender and the receiver.
            WaitTimeout: names the ranks that did not report.
        """
        met, number = self.met, self._number
        until = time.monotonic() + met.terms.timeout_s
        self._send()
        keys = protocol.moved(number, met.terms)
        left = max(LOOK_S, until - time.monotonic())
        found = met.store.get_all(keys, left, protocol.update_failed(number), self._watch)
        failures = {keys[key]: outcome.failure for key, outcome in found.items() if outcome.failure}
        if resigned := met.store.resigned():
            failures[""] = resigned
        if failures:
            raise WeightSyncError(failing.cause(failures))

    def _ask(self, request: Request) -> Reply:
        return self._client.ask(request, self._sync.timeout_s + GRACE_S)[0]
