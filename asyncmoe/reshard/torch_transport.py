"""Messages over a torch.distributed process group (gloo between CPUs, NCCL between GPUs)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncmoe.errors import TransferError, WaitTimeout

if TYPE_CHECKING:
    import torch
    import torch.distributed


_ROUNDING_S = 0.01
"""Gloo rounds timeouts to whole milliseconds, so it may time out slightly early."""


class TorchTransport:
    """Point-to-point messages in a process group, which need not be registered with torch.

    All receives and sends of an exchange are posted in the order of the ranks before any wait, so ranks that call `exchange` with the same
    plan cannot deadlock. After an error the group is unusable.

    Args:
        group: the process group; None: the default group.
        device: device of the message buffers: "cpu" for gloo, "cuda" or "cuda:0" for NCCL.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None, device: str = "cpu") -> None:
        import torch
        import torch.distributed

        self._torch, self._device = torch, device
        found: Any = group or torch.distributed.group.WORLD
        self._group = found
        self.rank: int = found.rank()
        # Makes the error of the first failed round, anew each time, because a raised error keeps its frames' buffers and weights alive.
        self._failure: Callable[[], TransferError | WaitTimeout] | None = None

    def empty(self, nbytes: int) -> torch.Tensor:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], timeout_s: float) -> None:
        """As `asyncmoe.reshard.transport.Transport`.

        Raises:
            WaitTimeout: a message did not arrive, or its peer did not receive it, in time.
            TransferError: a rank is gone.
        """
        self.post(sends, receives)(timeout_s)

    def post(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Callable[[float], None]:
        """As `asyncmoe.reshard.transport.PostingTransport`. Gloo keeps the order of a pair's messages (gloo/transport/tcp/pair.cc).

        Raises:
            TransferError: a rank is gone.
        """
        posted = self._post(sends, receives)

        def complete(timeout_s: float) -> None:
            if self._failure is not None:
                raise self._failure()  # no other posted message will arrive
            began = time.monotonic()
            for source, destination, work in posted:
                self._wait(source, destination, work, began, timeout_s)

        return complete

    def _post(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> list[tuple[int, int, Any]]:
        """Post all messages; return (source, destination, handle) of each. NCCL returns one handle, paired with the first message."""
        ends = [(rank, self.rank) for rank, _ in receives] + [(self.rank, rank) for rank, _ in sends]
        if self._device != "cpu":
            p2p = self._torch.distributed
            posts = [(p2p.irecv, *one) for one in receives] + [(p2p.isend, *one) for one in sends]
            operations = [p2p.P2POp(post, buffer, group=self._group, group_peer=rank) for post, rank, buffer in posts]
            works = p2p.batch_isend_irecv(operations) if operations else []
            return [(*pair, work) for pair, work in zip(ends, works, strict=False)]
        works = []
        try:
            works += [self._group.recv([buffer], rank, 0) for rank, buffer in receives]
            works += [self._group.send([buffer], rank, 0) for rank, buffer in sends]
        except RuntimeError as error:
            raise TransferError(*ends[len(works)], f"{self._peer(*ends[len(works)])} is gone ({_first_line(error)})") from error
        return [(*pair, work) for pair, work in zip(ends, works, strict=True)]

    def _wait(self, source: int, destination: int, work: torch.distributed.Work, began: float, timeout_s: float) -> None:
        until = began + timeout_s
        try:
            work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
        except RuntimeError as error:
            peer = self._peer(source, destination)
            what = "its message" if destination == self.rank else "to take a message"
            if time.monotonic() < until - _ROUNDING_S:
                self._failure = partial(TransferError, source, destination, f"{peer} is gone ({_first_line(error)})")
            else:
                self._failure = partial(WaitTimeout, peer, f"{what} ({_first_line(error)})", time.monotonic() - began)
            raise self._failure() from error

    def _peer(self, source: int, destination: int) -> str:
        return f"rank {source if destination == self.rank else destination}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
