"""The GPU report of a rank for the rendezvous, and a bounded wait for a GPU."""

from __future__ import annotations

import socket
from concurrent.futures import Future

import torch

from asyncmoe.config.transports import TRANSPORTS
from asyncmoe.errors import WaitTimeout
from asyncmoe.reshard import device_threads
from asyncmoe.reshard.nccl import origin
from asyncmoe.weights.protocol import Card, Terms


def card_of(device: torch.device, terms: Terms, wanted: int = 0, copy: int = 0) -> Card | None:
    """Describe a rank's GPU; return None for a CPU. Call it in a thread of that device.

    Args:
        wanted, copy: see `Card`.

    Raises:
        UserError: the transport is NCCL and no usable NCCL was found.
    """
    if device.type != "cuda":
        return None
    found = origin() if TRANSPORTS[terms.transport].nccl else None
    free, total = torch.cuda.mem_get_info(device)
    # Torch frees its cached memory before it reports that memory is short, though fragments may be too small.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    uuids = {index: _uuid(index) for index in range(torch.cuda.device_count())}
    unreachable = {uuid for index, uuid in uuids.items() if index != device.index and not torch.cuda.can_device_access_peer(device, index)}
    return Card(
        host=socket.gethostname(),
        device=str(device),
        uuid=uuids[device.index],
        free=free + kept,
        total=total,
        wanted=wanted,
        nccl=found.words if found else "",
        library=found.path if found else "",
        unreachable=tuple(sorted(unreachable)),
        copy=copy,
    )


def reach_each_other() -> bool:
    """Return whether all GPUs that this process sees, if any, read each other's memory."""
    count = range(torch.cuda.device_count())
    return all(torch.cuda.can_device_access_peer(one, other) for one in count for other in count if one != other)


def wait_idle(device: torch.device, timeout_s: float) -> None:
    """Wait until a device has finished all work this process has enqueued, on any stream. Return at once for a CPU.

    Raises:
        WaitTimeout: the device did not finish in time.
    """
    if device.type != "cuda":
        return
    done: Future[None] = Future()

    def synchronize() -> None:
        torch.cuda.synchronize(device)
        done.set_result(None)

    # CUDA's own wait has no timeout.
    device_threads.start(str(device), "idle", synchronize, done.set_exception)
    try:
        done.result(timeout_s)
    except TimeoutError:
        raise WaitTimeout(f"{device} of {socket.gethostname()}", "what was enqueued on it", timeout_s) from None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
