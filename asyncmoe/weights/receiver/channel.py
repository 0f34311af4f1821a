"""Channels: the transport of weights between the ranks of a meeting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from asyncmoe.config.transports import TRANSPORTS
from asyncmoe.errors import AsyncmoeError
from asyncmoe.reshard import Exchanger, Plan
from asyncmoe.reshard.gpu import Relieve, nothing_to_give
from asyncmoe.reshard.nccl import make_unique_id
from asyncmoe.reshard.transport import Watch, nothing_to_watch
from asyncmoe.weights.protocol import (
    AllArrived,
    ChannelStage,
    Outcome,
    Terms,
    channel,
    channel_all,
    channel_failed,
    names,
    update_failed,
)
from asyncmoe.weights.receiver import failing
from asyncmoe.weights.receiver.channel_end import ChannelEnd, opener
from asyncmoe.weights.receiver.control_store import Store

log = logging.getLogger(__name__)
_GRACE_S = 5.0


class SideStream:
    """The queue for copies of weights on a device: on a GPU, a CUDA stream separate from the one that computes with the weights.

    An exchange waits on the host for its copies, so the arrays may be used once it has returned. Only `follow` orders earlier work before
    the copies.

    Attributes:
        stream: None on a CPU, where the methods do nothing.
        handle: the stream as a cudaStream_t.
        relieve: frees the device's cached memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.handle = 0 if self.stream is None else self.stream.cuda_stream
        self.relieve: Relieve = nothing_to_give if self.stream is None else torch.cuda.empty_cache

    def follow(self) -> None:
        """Order later work on this stream after all work enqueued on the calling thread's current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def allocating(self) -> AbstractContextManager[object]:
        """Context in which new tensors belong to this stream: torch's caching allocator (torch/cuda/memory.py) neither hands their memory
        to another stream before the work enqueued here is done, nor takes memory that another stream still uses."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


HOST = SideStream(torch.device("cpu"))


Arrays = Callable[[], tuple[Mapping[str, torch.Tensor] | None, Mapping[str, torch.Tensor] | None]]
"""Returns the source arrays and the destination arrays by name, as `Exchanger.bind` expects them."""


def connect(
    store: Store,
    terms: Terms,
    plan: Plan,
    epoch: int,
    side: SideStream = HOST,
    watch: Watch = nothing_to_watch,
    arrays: Arrays | None = None,
    update: Callable[[], int] = lambda: 0,
) -> Exchanger:
    """Make this rank's end of channel `epoch`; return when all ranks have made theirs. From then on, waiting ranks notice a dead peer.
    A channel in which anything failed is never used again.

    All memory the channel needs is allocated here. A rank out of memory for its arrays reports that before the ranks connect; a rank out
    of memory for messages or copy tables reports it before any rank sends.

    Args:
        side: where to enqueue copies.
        watch: on rank 0, called every second while waiting; raises if a rank will not join or is gone.
        arrays: returns the arrays to bind.
        update: returns the number of the update under way; connecting stops if another rank fails in that update.

    Raises:
        WaitTimeout: the other ranks did not join in time.
        WeightSyncError: a rank is gone or could not make its end (no memory for the messages, no usable NCCL or GPU); the same message on
            every rank.
    """
    bound, failure = None, ""
    exchanger: Exchanger | None = None

    def look() -> None:
        store.check_failed(channel_failed(epoch, "make"), update_failed(update()))
        watch()

    try:
        bound = arrays() if arrays is not None else None
    except Exception as error:  # noqa: BLE001  reported to all ranks
        failure = failing.said(error, terms, store.rank, side.device)
    if failure:
        side.relieve()  # some of the arrays may have been allocated
    unique_id = make_unique_id if TRANSPORTS[terms.transport].nccl else bytes
    arrived = _assemble(store, terms, epoch, "arrive", watch, Outcome(failure), unique_id)
    try:
        end = ChannelEnd(
            rank=store.rank,
            world=terms.world,
            session=f"{terms.session}-{epoch}",
            timeout_s=terms.timeout_s,
            device=side.device.index,
            stream=side.handle,
            relieve=side.relieve,
            watch=look,
            store=store,
            epoch=epoch,
            terms=terms,
            unique_id=arrived.unique_id,
        )
        exchanger = Exchanger(
            plan,
            opener(terms.transport)(end),
            bucket_bytes=terms.bucket_bytes,
            timeout_s=terms.timeout_s,
            threads=1,  # the trainer's step or the engine runs at the same time
            stream=side.handle,
            relieve=side.relieve,
            delta=terms.delta,
            watch=look,
        )
        if bound is not None:
            exchanger.bind(*bound)
    except Exception as error:  # reported to all ranks
        failure = failing.said(error, terms, store.rank, side.device)
        if not isinstance(error, AsyncmoeError):  # from the transport's code; reports to other ranks lack its traceback
            log.exception("rank %d cannot make its end of channel %d over %s", store.rank, epoch, terms.transport)
    try:
        _assemble(store, terms, epoch, "make", watch, Outcome(failure))
    except AsyncmoeError:
        if exchanger is not None:
            exchanger.close()
        raise
    assert exchanger is not None
    return exchanger


def _assemble(
    store: Store,
    terms: Terms,
    epoch: int,
    stage: ChannelStage,
    watch: Watch,
    mine: Outcome,
    unique_id: Callable[[], bytes] = bytes,
) -> AllArrived:
    """Wait until every rank has reached a stage without a failure; return rank 0's message.

    Args:
        mine: this rank's report.
        unique_id: on rank 0, makes `AllArrived.unique_id`.

    Raises:
        WaitTimeout, WeightSyncError: see `connect`.
    """
    if mine.failure:
        store.put(channel_failed(epoch, stage), mine)
    if store.rank != 0:
        store.put(channel(epoch, stage, store.rank), mine)
        told = store.get(channel_all(epoch, stage), terms.timeout_s + _GRACE_S)
        told.check()
        return told
    whom = names(terms)
    try:
        keys = {channel(epoch, stage, rank): name for rank, name in whom.items() if rank != 0}
        said = store.get_all(keys, terms.timeout_s, channel_failed(epoch, stage), watch)
        failures = {keys[key]: one.failure for key, one in said.items()} | {whom[0]: mine.failure, "": store.resigned()}
        failures = {name: why for name, why in failures.items() if why}
        Outcome(failing.cause(failures) if failures else "").check()
        settled = AllArrived(unique_id=unique_id())
    except AsyncmoeError as error:
        store.put(channel_all(epoch, stage), AllArrived(str(error)))
        raise
    store.put(channel_all(epoch, stage), settled)
    return settled
