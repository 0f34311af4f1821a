"""A rank's device as the meeting wants to know it, and what a device still has to do."""

from __future__ import annotations

import socket
from concurrent.futures import Future

import torch

from asyncmoe.errors import WaitTimeout
from asyncmoe.receiver.protocol import Card, Terms
from asyncmoe.reshard import device_threads
from asyncmoe.reshard.nccl_transport import origin


def card_of(device: torch.device, terms: Terms, wanted: int) -> Card | None:
    """None of a CPU. To be asked in a thread of that device.

    Args:
        wanted: bytes that are going to be allocated there.

    Raises:
        UserError: weights travel by NCCL, and there is no usable one.
    """
    if device.type != "cuda":
        return None
    found = origin() if terms.transport == "nccl" else None
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    # What torch keeps for later it gives back before it says that there is none; in pieces that may be too small.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    uuids = {index: _uuid(index) for index in range(torch.cuda.device_count())}
    unreachable = {uuid for index, uuid in uuids.items() if index != device.index and not torch.cuda.can_device_access_peer(device, index)}
    return Card(
        host=socket.gethostname(),
        device=str(device),
        uuid=uuids[device.index],
        model=f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})",
        free=free + kept,
        total=total,
        wanted=wanted,
        torch=str(torch.__version__),
        nccl=found.words if found else "",
        library=found.path if found else "",
        unreachable=tuple(sorted(unreachable)),
    )


def wait_idle(device: torch.device, timeout_s: float) -> None:
    """Return when a device has done all that this process has enqueued on it, on any stream. Nothing to wait for on a CPU.

    Raises:
        WaitTimeout: it was not done in time.
    """
    if device.type != "cuda":
        return
    done: Future[None] = Future()

    def synchronize() -> None:
        torch.cuda.synchronize(device)
        done.set_result(None)

    # CUDA's own wait has no bound.
    device_threads.start(str(device), "idle", synchronize, done.set_exception)
    try:
        done.result(timeout_s)
    except TimeoutError:
        raise WaitTimeout(f"{device} of {socket.gethostname()}", "what was enqueued on it", timeout_s) from None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
