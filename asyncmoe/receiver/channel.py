"""How weights travel between the ranks that have met."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal

import msgspec
import torch

from asyncmoe.errors import AsyncmoeError, ConfigError
from asyncmoe.receiver import failing, meeting
from asyncmoe.receiver.meeting import Outcome, Store, Terms
from asyncmoe.reshard import Exchanger, Plan, SharedTransport, Transport
from asyncmoe.reshard.gpu import Gpu, Relieve, nothing_to_give
from asyncmoe.reshard.ipc_transport import IpcTransport
from asyncmoe.reshard.nccl_transport import NcclTransport, make_unique_id
from asyncmoe.reshard.shm_transport import ShmTransport
from asyncmoe.reshard.torch_transport import TorchTransport

_GROUP_S = 30.0
"""For ranks that have all come to make a process group, which looks after nobody while it is made."""
_GRACE_S = 5.0


def transport_for(
    wanted: Literal["auto", "shm", "gloo", "nccl", "ipc"], gpu: bool, together: bool = True, shared: bool = False
) -> Literal["shm", "gloo", "nccl", "ipc"]:
    """How messages travel, from `sync.transport` and where the weights are.

    Args:
        together: all ranks share one machine's memory.
        shared: trainer and engines share GPUs (`engines.share_gpus`): NCCL refuses two ranks on one.

    Raises:
        ConfigError: a way that does not go there.
    """
    if gpu and shared and not together:
        cure = "keep the trainer and all engines on one machine, or give engines GPUs of their own"
        raise ConfigError("engines.share_gpus", got="true", expected="false between several machines", cure=cure)
    if gpu and shared and wanted == "nccl":
        raise ConfigError("sync.transport", got=wanted, expected="auto or ipc where trainer and engines share GPUs")
    if not together and wanted in ("shm", "ipc"):
        cure = "leave it out, or keep the trainer and all engines on one machine"
        raise ConfigError("sync.transport", got=wanted, expected="auto, gloo or nccl between several machines", cure=cure)
    possible = ("nccl", "ipc") if gpu else ("shm", "gloo")
    if wanted == "auto":
        return ("ipc" if shared else "nccl") if gpu else ("shm" if together else "gloo")
    if wanted not in possible:
        where = "GPUs" if gpu else "CPUs"
        raise ConfigError("sync.transport", got=wanted, expected=f"auto, {possible[0]} or {possible[1]} between {where}")
    return wanted


class SideStream:
    """A stream beside that of a thread which computes with what is copied.

    An exchange waits on the host for its copies, so what it read or wrote may be used when it has returned; it is only ordered
    behind what came before by `follow`.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """What is enqueued here from now on waits for what the calling thread has enqueued on its current stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def allocating(self) -> AbstractContextManager[object]:
        """Tensors that are made within it are this stream's: torch gives their memory to nobody else before what is enqueued here is
        done with it, nor takes it from another stream that is not (torch/cuda/memory.py, CUDA caching allocator)."""
        return torch.cuda.stream(self.stream)


Arrays = Callable[[], tuple[Mapping[str, torch.Tensor] | None, Mapping[str, torch.Tensor] | None]]
"""Makes what is read and what is written by name, as `Exchanger.bind` takes it."""


class _UniqueId(msgspec.Struct, frozen=True):
    value: bytes


def connect(
    store: Store,
    terms: Terms,
    plan: Plan,
    epoch: int,
    side: SideStream | None = None,
    watch: Callable[[], None] = lambda: None,
    arrays: Arrays | None = None,
) -> Exchanger:
    """This rank's end of channel `epoch`; returns when all ends are there, so that from then on whoever waits for a rank also sees it end.
    A channel in which anything failed is not used again.

    All memory that the channel needs is taken here: a rank that has none for its arrays says so before the others begin to meet, and
    one that has none for messages or tables before anybody begins to send.

    Args:
        side: where to enqueue copies, if the weights are on GPUs.
        watch: on rank 0, called every second of waiting; raises when a rank will not come.
        arrays: what is to be bound.

    Raises:
        WaitTimeout: the others did not come in time.
        WeightSyncError: one is gone, or could not make its end (no memory for the messages, no usable NCCL or GPU); all ranks say the same.
    """
    device, stream = (side.stream.device.index, side.stream.cuda_stream) if side else (0, 0)
    place = side.stream.device if side else torch.device("cpu")
    relieve = torch.cuda.empty_cache if side else nothing_to_give
    exchanger, bound, failure = None, None, ""
    try:
        bound = arrays() if arrays is not None else None
    except Exception as error:  # noqa: BLE001  said to all ranks
        failure = failing.said(error, terms, store.rank, place)
    if failure:
        relieve()  # of a part of the arrays
    _assemble(store, terms, f"channel/{epoch}/come", watch, failure)
    try:
        transport = _transport(store, terms, epoch, device, stream, relieve)
        # One thread: the step, and the engine, go on meanwhile.
        exchanger = Exchanger(
            plan, transport, bucket_bytes=terms.bucket_bytes, timeout_s=terms.timeout_s, threads=1, stream=stream, relieve=relieve
        )
        if bound is not None:
            exchanger.bind(*bound)
    except Exception as error:  # noqa: BLE001  said to all ranks
        failure = failing.said(error, terms, store.rank, place)
    try:
        _assemble(store, terms, f"channel/{epoch}/made", watch, failure)
    except AsyncmoeError:
        if exchanger is not None:
            exchanger.close()
        raise
    assert exchanger is not None
    return exchanger


def _assemble(store: Store, terms: Terms, key: str, watch: Callable[[], None], failure: str = "") -> None:
    """Return when all ranks have come here without a failure.

    Raises:
        WaitTimeout, WeightSyncError: see `connect`.
    """
    if failure:
        store.put(f"{key}/failed", Outcome(failure))
    if store.rank != 0:
        store.put(f"{key}/{store.rank}", Outcome(failure))
        meeting.heed(store.get(f"{key}/all", Outcome, terms.timeout_s + _GRACE_S))
        return
    others = meeting.names(terms)
    ours = others.pop(0)
    try:
        said = store.get_all({f"{key}/{rank}": whom for rank, whom in others.items()}, Outcome, terms.timeout_s, f"{key}/failed", watch)
        failures = {whom: said[f"{key}/{rank}"].failure for rank, whom in others.items() if f"{key}/{rank}" in said} | {ours: failure}
        failures = {whom: why for whom, why in (failures | {"": store.resigned()}).items() if why}
        meeting.heed(Outcome(meeting.cause(failures) if failures else ""))
    except AsyncmoeError as error:
        store.put(f"{key}/all", Outcome(str(error)))
        raise
    store.put(f"{key}/all", Outcome())


def _transport(store: Store, terms: Terms, epoch: int, device: int, stream: int, relieve: Relieve) -> Transport | SharedTransport:
    session = f"{terms.session}-{epoch}"
    match terms.transport:
        case "shm":
            return ShmTransport(store.rank, session)
        case "ipc":
            return IpcTransport(store.rank, session, device, stream=stream, gpu=Gpu(device, relieve))
        case "nccl":
            key = f"nccl/{epoch}"
            if store.rank == 0:
                store.put(key, _UniqueId(make_unique_id()))
            unique = store.get(key, _UniqueId, terms.timeout_s).value
            return NcclTransport(
                store.rank, terms.world, unique, device, stream=stream, timeout_s=terms.timeout_s, gpu=Gpu(device, relieve)
            )
        case "gloo":
            return TorchTransport(store.connect(terms.world, epoch, min(_GROUP_S, terms.timeout_s)))
