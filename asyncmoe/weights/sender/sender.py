"""Send weight versions to the engines of one meeting, and decide when to resend a version."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import torch

from asyncmoe.errors import AsyncmoeError, WaitTimeout, WeightSyncError
from asyncmoe.reshard import DeltaEncoder, Exchanger
from asyncmoe.reshard.transport import nothing_to_watch
from asyncmoe.rpc.messages import Committed, Reply, Request, WeightsAbort, WeightsCommit, WeightsStage
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import Header, Offer, Outcome, Over
from asyncmoe.weights.receiver import channel, failing
from asyncmoe.weights.receiver.channel import SideStream
from asyncmoe.weights.sender import deltas
from asyncmoe.weights.sender.publisher import Checksums, Traffic
from asyncmoe.weights.sender.rendezvous import GRACE_S, Meeting, TrainerRanks

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Polling interval while waiting."""
_PATIENCE_S = 60.0


class Sender:
    """One rank's sender. All ranks make the same calls in the same order, each from one thread.

    Args:
        tensors: the tensors to send, by the names of the plan's storages.
        side: where to enqueue copies.
        sent: event to set as soon as this rank has sent its part of an update and no longer reads `tensors`.

    Attributes:
        doubted: whether the latest update failed because an engine rank refused a delta, so that a full update of the same version may
            succeed; the same on all ranks.
        traffic: traffic of the latest update, on rank 0 where updates may be deltas; else None.
    """

    def __init__(
        self, ranks: TrainerRanks, met: Meeting, tensors: Mapping[str, torch.Tensor], side: SideStream, sent: threading.Event
    ) -> None:
        self.met, self._ranks, self._rank, self._device = met, ranks, ranks.rank, ranks.model.mesh.device
        self._is_sent, self._timeout_s, self._tensors, self._side = sent, ranks.config.sync.timeout_s, tensors, side
        self._exchanger: Exchanger | None = None
        self._encoder: DeltaEncoder | None = None
        self.doubted = False
        self.traffic: Traffic | None = None
        self._number = self._epoch = 0  # N of the update and E of the channel in `asyncmoe.weights.protocol`

    def send(self, version: int, expected: Checksums) -> float:
        """Send a version; return when every engine serves it.

        Args:
            expected: the checksums the engines must report; on rank 0.

        Returns:
            The longest pause of any engine in milliseconds, on rank 0; 0 on all other ranks.

        Raises:
            WeightSyncError, WaitTimeout: the update failed; raised on every rank.
        """
        self._number += 1
        if self._exchanger is None:
            self._epoch += 1
        self.doubted = False
        try:
            return self._lead(version, expected) if self._rank == 0 else self._follow(version)
        except Exception as error:
            if self._encoder is not None:
                self._encoder.forget()  # engines may have parts of the version, so the next update is full
            if isinstance(error, AsyncmoeError):
                raise  # this rank has already reported the failure, or received it from another
            self.met.store.resign(self._number, self._said(error))
            raise

    def needed_again(self, settling: threading.Event) -> bool:
        """Wait until the version is settled (False), or until all engines that received it are gone and new ones need it (True)."""
        store, key = self.met.store, protocol.over(self._number)
        if self._rank == 0:
            try:
                while not (over := settling.wait(LOOK_S)) and not self._ranks.starving():
                    pass
            except AsyncmoeError as error:
                store.put(key, Over(failure=str(error)))
                raise
            store.put(key, Over(again=not over))
            return not over
        while True:
            try:
                told = store.get(key, _PATIENCE_S)
            except WaitTimeout:
                continue
            told.check()
            return told.again

    def leave(self) -> None:
        """Close the channel; the next update connects a new one."""
        if self._exchanger is not None:
            self._exchanger.close()
        self._exchanger = None

    def _lead(self, version: int, expected: Checksums) -> float:
        """Run rank 0's part of an update; return the longest pause in milliseconds."""
        store, number = self.met.store, self._number
        if number > 2:
            store.forget(number - 2, self.met.terms)
        begun, base = False, None
        try:
            base = self._agree(version)
            self._ask(WeightsStage(version, in_place=base is None and self.met.terms.in_place))
            store.put(protocol.header(number), Header(version, self._epoch, base=base))
            begun = True
            self._send_and_collect(version, base)
            committed = self._ask(WeightsCommit(version, expected, number))
        except Exception as error:
            failure = str(error) if isinstance(error, AsyncmoeError) else self._said(error)
            if begun:
                store.put(protocol.end(number), Outcome(failure, self.doubted))
                self._ask(WeightsAbort(version, failure))
            else:
                store.put(protocol.header(number), Header(version, self._epoch, failure))
            raise
        store.put(protocol.end(number), Outcome())
        assert isinstance(committed, Committed)
        return max(committed.pause_ms)

    def _follow(self, version: int) -> float:
        """Run any other rank's part of an update."""
        store, number, wait_s = self.met.store, self._number, self._timeout_s + GRACE_S
        if self.met.terms.delta:
            store.put(protocol.offer(number, self._rank), self._offer(version))
            wait_s *= 2  # rank 0 waits for the last offer first
        header = store.get(protocol.header(number), wait_s)
        Outcome(header.failure).check()
        self._send(version, header.base)
        ended = store.get(protocol.end(number), 3 * (self._timeout_s + GRACE_S))
        self.doubted = ended.doubtful
        ended.check()
        return 0.0

    def _agree(self, version: int) -> int | None:
        """Decide whether an update is a delta, and tell every engine rank what to expect; return its base, or None for a full update.

        Raises:
            WeightSyncError, WaitTimeout: a rank could not encode its part, or made no offer in time.
        """
        if not self.met.terms.delta:
            return None
        store, number, terms = self.met.store, self._number, self.met.terms
        others = {protocol.offer(number, rank): name for rank, name in protocol.trainer_ranks(terms).items() if rank}
        mine = self._offer(version)
        found = store.get_all(others, self._timeout_s, protocol.update_failed(number), self._ranks.look)
        offers = {0: mine} | {rank: found[key] for rank, key in enumerate(others, 1) if key in found}
        failures = {f"trainer rank {rank}": one.failure for rank, one in offers.items() if one.failure} | {"": store.resigned()}
        if why := [one for one in failures.values() if one]:
            raise WeightSyncError(why[0])
        base = deltas.common_base(offers)
        self.traffic = deltas.traffic(offers, base)
        for rank, coming in deltas.comings(offers, protocol.engine_ranks(terms), base).items():
            store.put(protocol.coming(number, rank), coming)
        return base

    def _offer(self, version: int) -> Offer:
        try:
            if self._encoder is None:
                size, side = self.met.terms.bucket_bytes, self._side
                # One thread, because the trainer's step runs at the same time.
                encoder = DeltaEncoder(self.met.plan, self._rank, bucket_bytes=size, threads=1, stream=side.handle, relieve=side.relieve)
                encoder.bind(self._tensors)
                self._encoder = encoder
            return deltas.offer(self._encoder, self.met.plan, version)
        except Exception as error:
            if not isinstance(error, AsyncmoeError):
                log.exception("coding update %d of trainer rank %d failed", self._number, self._rank)
            return Offer(self._said(error))

    def _send(self, version: int, base: int | None) -> None:
        """Send this rank's shards and report success or failure. A failure is raised later, once rank 0 has collected all reports.

        Args:
            base: the version that the update changes, if it is a delta.
        """
        met, key = self.met, protocol.sent(self._number, self._rank)
        try:
            if self._exchanger is None:
                self._exchanger = channel.connect(
                    met.store,
                    met.terms,
                    met.plan,
                    self._epoch,
                    self._side,
                    self._ranks.look if self._rank == 0 else nothing_to_watch,
                    arrays=lambda: (self._tensors, None),
                    update=lambda: self._number,
                )
            elif self._ranks.config.in_turn:
                self._exchanger.bind(self._tensors)  # they have been elsewhere meanwhile
            self._exchanger.run(met.terms.timeout_s, encoder=None if base is None else self._encoder)
        except Exception as error:
            met.store.fail(self._number, key, self._said(error))
            if not isinstance(error, AsyncmoeError):
                log.exception("update %d of trainer rank %d failed", self._number, self._rank)
            self.leave()
        else:
            self._is_sent.set()
            met.store.put(key, Outcome())

    def _send_and_collect(self, version: int, base: int | None) -> None:
        """Send, and wait until all ranks have sent, or received and verified, their parts.

        Raises:
            WeightSyncError: a message was lost or corrupted; names the sender and the receiver.
            WaitTimeout: names the ranks that did not report.
        """
        met, number = self.met, self._number
        until = time.monotonic() + met.terms.timeout_s
        self._send(version, base)
        keys = protocol.moved(number, met.terms)
        left = max(LOOK_S, until - time.monotonic())
        found = met.store.get_all(keys, left, protocol.update_failed(number), self._ranks.look)
        failures = {keys[key]: outcome.failure for key, outcome in found.items() if outcome.failure}
        if resigned := met.store.resigned():
            failures[""] = resigned
        if failures:
            doubts = {keys[key]: outcome.failure for key, outcome in found.items() if outcome.doubtful}
            self.doubted = bool(doubts) and not resigned
            raise WeightSyncError(failing.cause(doubts or failures))

    def _said(self, error: Exception) -> str:
        return failing.said(error, self.met.terms, self._rank, self._device)

    def _ask(self, request: Request) -> Reply:
        return self._ranks.client.ask(request, self._timeout_s + GRACE_S)[0]
