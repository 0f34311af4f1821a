"""The receiver: a thread in an SGLang worker that stages new weights, and the commit that makes them the worker's parameters."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref

import torch

from asyncmoe.config.transports import TRANSPORTS
from asyncmoe.errors import AsyncmoeError, InvariantBroken, WaitTimeout
from asyncmoe.platform.sglang import receiver_command
from asyncmoe.platform.sglang.receiver_command import FAMILY_VARIABLE, CommitCommand, JoinCommand
from asyncmoe.process import yield_cores
from asyncmoe.reshard import DeltaDecoder, Exchanger, Plan, device_threads
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import Header, Outcome, Ready, Terms
from asyncmoe.weights.receiver import channel, deltas, failing, handshake, transfer_plan
from asyncmoe.weights.receiver.cards import card_of
from asyncmoe.weights.receiver.channel import SideStream
from asyncmoe.weights.receiver.channel_end import opener
from asyncmoe.weights.receiver.control_store import Store, StoreGone
from asyncmoe.weights.receiver.weight_buffers import AdapterMemory, Staged, Weights

log = logging.getLogger(__name__)
_MEET_S = 60.0
_IDLE_S = 3600.0
_FORMER_S = 2.0

_receivers: weakref.WeakKeyDictionary[torch.nn.Module, Receiver] = weakref.WeakKeyDictionary()


def obey(model: torch.nn.Module, text: str) -> None:
    """Execute a command, in the worker's main thread.

    Raises:
        InvariantBroken: a commit of a version that is not staged; the worker must not continue.
        ProtocolError: the text is not a command.
    """
    receiver = _receivers.get(model)
    match receiver_command.parse(text):
        case JoinCommand() as join:
            if receiver is not None:
                receiver.leave()
            _receivers[model] = Receiver(model, join, receiver)
        case CommitCommand() as commit:
            if receiver is None:
                raise InvariantBroken(f"version {commit.version} was committed in a worker without a receiver")
            receiver.commit(commit.version, commit.update)


class Receiver:
    """Meets the sender and receives updates, in a background thread, until the sender is gone.

    Args:
        model: the worker's model. Its parameters or adapter memory (`_target`) are written only by `commit` or, without staging memory,
            while the worker is paused.
        former: the receiver of the previous meeting, already told to leave.
    """

    def __init__(self, model: torch.nn.Module, join: JoinCommand, former: Receiver | None) -> None:
        self._model, self._join = model, join
        self._target = Weights(model)
        self._places, self._obstacles = handshake.places(), tuple(handshake.obstacles(model))
        self._lock = threading.Lock()
        self._staged: Staged | None = None
        self._spare: dict[str, torch.Tensor] = {}
        self._decoder: DeltaDecoder | None = None  # set if updates may be deltas
        self._left, self._ended = threading.Event(), ""
        self._device = next(model.parameters()).device
        self._former = former
        # The former receiver's stream, so that torch can reuse the memory cached for it.
        self._side: SideStream = SideStream(self._device) if former is None else former._side
        self._store: Store | None = None
        self._terms: Terms | None = None
        self._number = 1  # number of the update under way, or of the next one
        self._exchanger: Exchanger | None = None
        self._thread = device_threads.start(str(self._device), "weights", self._run, self._ends)

    def _run(self) -> None:
        if self._former is not None:
            self._former._thread.join(_FORMER_S)  # it may still use memory that this receiver needs
            self._former = None
        store = self._store = Store(self._join.group, self._join.rank, self._join.host, self._join.port, _MEET_S)
        terms = store.get(protocol.TERMS, _MEET_S)
        self._terms = terms
        if terms.adapter is not None:
            self._target, self._obstacles = AdapterMemory(self._model), ()
        plan = self._plan(store, terms)
        # Rank 0 waits `timeout_s` for the last rank before it sets the verdict.
        verdict = store.get(protocol.VERDICT, 2 * terms.timeout_s)
        terms = self._terms = verdict.settle(terms)
        if not terms.in_place:
            yield_cores()  # the worker generates meanwhile
        if not verdict.failure:
            if terms.delta:
                rank, size, side = self._join.rank, terms.bucket_bytes, self._side
                # One thread, because the engine generates at the same time.
                self._decoder = DeltaDecoder(plan, rank, bucket_bytes=size, threads=1, stream=side.handle, relieve=side.relieve)
            self._serve(store, terms, plan)

    def _ends(self, error: Exception) -> None:
        """Report the error that ended the thread, so that no rank waits for this one, and commits can say why nothing is staged."""
        level = logging.INFO if self._left.is_set() else logging.WARNING  # after `leave` an error is expected
        self._ended = failing.said(error, self._terms, self._join.rank, self._device)
        log.log(level, "the weight receiver ends: %s", self._ended, exc_info=None if isinstance(error, AsyncmoeError) else error)
        if self._left.is_set() or self._store is None or isinstance(error, StoreGone):
            return
        try:
            self._store.resign(self._number, self._ended)
        except Exception as gone:  # noqa: BLE001  the thread ends: nobody else would learn of it
            log.warning("could not report the failure: %s", failing.in_one_line(gone))

    def leave(self) -> None:
        """Tell the thread to stop receiving."""
        self._left.set()

    def commit(self, version: int, update: int) -> None:
        """Make the worker use the staged weights. Called in its main thread, between forward passes.

        Raises:
            InvariantBroken: another update is staged, or none is.
        """
        with self._lock:
            staged, self._staged = self._staged, None
            if staged is None or (staged.version, staged.update) != (version, update):
                ended = f", because its receiver has ended: {self._ended}" if self._ended else ""
                what = f"nothing{ended}" if staged is None else f"version {staged.version} of update {staged.update}"
                raise InvariantBroken(f"rank {self._join.rank}: cannot commit version {version} of update {update}: staged is {what}")
            # Commit after all forward passes that read the weights, on any stream, and return only when the commit has finished, so that
            # the recorded pause is the real one.
            # The controller bounds both waits, and fences an engine whose GPU hangs.
            self._wait_idle()
            self._write(staged)
            self._wait_idle()
            if staged.tensors is not None:
                self._side.follow()

    def _wait_idle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write(self, staged: Staged) -> None:
        if staged.delta and self._decoder is not None:
            self._decoder.commit(staged.version)
            self._target.commit(None)
            return
        self._spare = self._target.commit(staged.tensors)
        if self._decoder is not None:
            self._decoder.bind(self._target.tensors())  # the same values, but in other memory after a swap

    def _plan(self, store: Store, terms: Terms) -> Plan:
        key = protocol.ready(self._join.rank)
        try:
            handshake.check_family(terms, os.environ.get(FAMILY_VARIABLE))
            opener(terms.transport)
            plan = transfer_plan.route(terms, self._join.rank)
            card = card_of(self._device, terms, *self._wanted(terms, plan))
            ready = Ready("", plan.digest, self._target.described(), self._places, self._obstacles, card)
        except Exception as error:
            store.put(key, Ready(failure=failing.in_one_line(error, terms)))
            raise
        store.put(key, ready)
        return plan

    def _wanted(self, terms: Terms, plan: Plan) -> tuple[int, int]:
        """Return upper bounds of the bytes that receiving allocates on the worker's GPU: for message buffers (0 if messages stay in the
        senders' memory), and for staging a whole version. Messages may be smaller than buckets."""
        room = sum(storage.nbytes for storage in plan.destinations[self._join.rank].values())
        reads_sender = TRANSPORTS[terms.transport].reads_sender
        return min(0 if reads_sender else 2 * terms.bucket_bytes, 2 * room), room

    def _serve(self, store: Store, terms: Terms, plan: Plan) -> None:
        epoch = 0
        try:
            while not self._left.is_set():
                try:
                    header = store.get(protocol.header(self._number), _IDLE_S)
                except WaitTimeout:
                    continue
                # If a later header exists, this process was suspended, and no rank waits for the older update any more.
                if not header.failure and not store.has(protocol.header(self._number + 1)):
                    self._drop()
                    if header.epoch != epoch:
                        self._disconnect()  # close the old channel first, which also ends its ranks' pending waits
                    self._update(store, terms, plan, header)
                    epoch = header.epoch
                self._number += 1
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        exchanger, self._exchanger = self._exchanger, None
        if exchanger is not None:
            exchanger.close()

    def _update(self, store: Store, terms: Terms, plan: Plan, header: Header) -> None:
        """Receive one update, through a channel that is closed if it can no longer be used."""
        number, key = self._number, protocol.staged(self._number, self._join.rank)
        try:
            if self._exchanger is None:
                arrays = functools.partial(self._arrays, terms)
                self._exchanger = channel.connect(store, terms, plan, header.epoch, self._side, arrays=arrays, update=lambda: self._number)
            elif header.base is None:
                self._exchanger.bind(*self._arrays(terms))
            staged = self._receive(store, terms, header, self._exchanger)
        except Exception as error:
            why = failing.said(error, terms, self._join.rank, self._device)
            store.fail(number, key, why, doubtful=isinstance(error, deltas.DeltaRefused))
            if not isinstance(error, AsyncmoeError):
                log.exception("update %d of rank %d failed", number, self._join.rank)
            self._disconnect()  # peers that wait for this rank notice
            return
        with self._lock:
            self._staged = staged
            if staged.tensors is not None:
                self._spare = {}
        store.put(key, Outcome())

    def _receive(self, store: Store, terms: Terms, header: Header, exchanger: Exchanger) -> Staged:
        """Receive the weights, or the delta, of an update."""
        number, decoder, coming = self._number, self._decoder, None
        if decoder is not None:
            coming = store.get(protocol.coming(number, self._join.rank), terms.timeout_s)
        if header.base is not None:
            if decoder is None or coming is None:
                raise InvariantBroken(f"update {number}: got a delta, expected a full update, as this meeting agreed on no deltas")
            if self._spare:  # encoded bytes need less memory than a second copy, which the next full update allocates again
                self._spare = {}
                exchanger.bind(None, self._target.tensors())
            deltas.receive(decoder, exchanger, header, coming, terms)
            return Staged(header.version, number, None, delta=True)
        if decoder is not None:
            decoder.forget()
        tensors = self._arrays(terms)[1]
        exchanger.run(terms.timeout_s)
        if decoder is not None and coming is not None:
            decoder.bind(tensors)
            decoder.adopt(header.version, coming.digests)
        return Staged(header.version, number, None if terms.in_place else tensors)

    def _drop(self) -> None:
        """Discard the staged update, if any, and reuse its memory."""
        with self._lock:
            staged, self._staged = self._staged, None
            if staged is not None and staged.tensors is not None:
                self._spare = staged.tensors
        if staged is not None and not staged.delta and self._decoder is not None:
            self._decoder.forget()  # a new delta replaces the dropped one

    def _arrays(self, terms: Terms) -> tuple[None, dict[str, torch.Tensor]]:
        """Return the source arrays (none on an engine) and the destination arrays for `Exchanger.bind`."""
        return None, self._target.tensors() if terms.in_place else self._staging()

    def _staging(self) -> dict[str, torch.Tensor]:
        """Return staging memory for an update: after a swap, the memory the parameters occupied before."""
        with self._lock, self._side.allocating():
            if not self._spare:
                self._spare = self._target.room()
            return self._spare
