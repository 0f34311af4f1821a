"""How weights travel between the ranks that have met."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from asyncmoe.errors import ConfigError
from asyncmoe.receiver.meeting import Store, Terms
from asyncmoe.reshard import Exchanger, Plan, SharedTransport, Transport
from asyncmoe.reshard.ipc_transport import IpcTransport
from asyncmoe.reshard.nccl_transport import NcclTransport, make_unique_id
from asyncmoe.reshard.shm_transport import ShmTransport
from asyncmoe.reshard.torch_transport import TorchTransport


def transport_for(
    wanted: Literal["auto", "shm", "gloo", "nccl", "ipc"], gpu: bool, together: bool = True
) -> Literal["shm", "gloo", "nccl", "ipc"]:
    """How messages travel, from `sync.transport` and where the weights are.

    Args:
        together: all ranks share one machine's memory.

    Raises:
        ConfigError: a way that does not go there.
    """
    if not together and wanted in ("shm", "ipc"):
        cure = "leave it out, or keep the trainer and all engines on one machine"
        raise ConfigError("sync.transport", got=wanted, expected="auto, gloo or nccl between several machines", cure=cure)
    possible = ("nccl", "ipc") if gpu else ("shm", "gloo")
    if wanted == "auto":
        return "nccl" if gpu else ("shm" if together else "gloo")
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


class _UniqueId(msgspec.Struct, frozen=True):
    value: bytes


def connect(store: Store, terms: Terms, plan: Plan, epoch: int, side: SideStream | None = None) -> Exchanger:
    """This rank's end of channel `epoch`; returns when the others' are there. A channel in which anything failed is not used again.

    Args:
        side: where to enqueue copies, if the weights are on GPUs.

    Raises:
        WaitTimeout: the others did not come in time.
        WeightSyncError: one that had come is gone, or there is no memory for the messages.
        UserError: no usable NCCL or GPU.
    """
    device, stream = (side.stream.device.index, side.stream.cuda_stream) if side else (0, 0)
    transport = _transport(store, terms, epoch, device, stream)
    # One thread: the step, and the engine, go on meanwhile.
    return Exchanger(plan, transport, bucket_bytes=terms.bucket_bytes, timeout_s=terms.timeout_s, threads=1, stream=stream)


def _transport(store: Store, terms: Terms, epoch: int, device: int, stream: int) -> Transport | SharedTransport:
    session = f"{terms.session}-{epoch}"
    match terms.transport:
        case "shm":
            return ShmTransport(store.rank, session)
        case "ipc":
            return IpcTransport(store.rank, session, device, stream=stream)
        case "nccl":
            key = f"nccl/{epoch}"
            if store.rank == 0:
                store.put(key, _UniqueId(make_unique_id()))
            unique = store.get(key, _UniqueId, terms.timeout_s).value
            return NcclTransport(store.rank, terms.world, unique, device, stream=stream, timeout_s=terms.timeout_s)
        case "gloo":
            return TorchTransport(store.connect(terms.world, epoch, terms.timeout_s))
