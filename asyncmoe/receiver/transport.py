"""Messages over the weight group, with a digest of everything that was sent to and received from each rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.errors import WaitTimeout, WeightSyncError
from asyncmoe.reshard import digest

_PRIME = 0x100000001B3
"""Of FNV-1a; messages of one pair of ranks are chained by it, so that their order counts."""


class GroupTransport:
    """An `asyncmoe.reshard.Transport` over a gloo process group that torch's registries do not know.

    All receives and sends of an exchange are posted before any is waited for. After an error the group cannot be used any more.

    Attributes:
        rank: in the group.
        digests: by rank, of all messages exchanged with it, in order, as 16 hexadecimal digits.

    Args:
        until: `time.monotonic()` at which every exchange gives up, whatever its own limit.
    """

    def __init__(self, group: dist.ProcessGroup, until: float) -> None:
        self.rank = group.rank()
        self._group, self._until = group, until
        self._digests: dict[int, int] = {}

    @property
    def digests(self) -> dict[int, str]:
        return {rank: f"{value:016x}" for rank, value in self._digests.items()}

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], timeout_s: float) -> None:
        """As `asyncmoe.reshard.Transport`.

        Raises:
            WaitTimeout: a message did not arrive, or was not taken, in time.
            WeightSyncError: a rank is gone.
        """
        began = time.monotonic()
        until = min(self._until, began + timeout_s)
        posted = []
        self._note(sends)
        try:
            posted += [(rank, "its message", self._group.recv([buffer], rank, 0)) for rank, buffer in receives]
            posted += [(rank, "it to take a message", self._group.send([buffer], rank, 0)) for rank, buffer in sends]
        except RuntimeError as error:
            raise WeightSyncError(f"rank {self.rank}: a rank of the weight group is gone: {_first_line(error)}") from error
        for rank, what, work in posted:
            self._wait(rank, what, work, began, until)
        self._note(receives)

    def _note(self, messages: Sequence[tuple[int, Any]]) -> None:
        for rank, buffer in messages:
            self._digests[rank] = (self._digests.get(rank, 0) * _PRIME ^ digest(buffer, threads=1)) & (1 << 64) - 1

    def _wait(self, rank: int, what: str, work: dist.Work, began: float, until: float) -> None:
        try:
            work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
        except RuntimeError as error:
            if time.monotonic() < until:
                raise WeightSyncError(f"rank {self.rank}: rank {rank} is gone: {_first_line(error)}") from error
            raise WaitTimeout(f"rank {rank}", what, time.monotonic() - began) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
