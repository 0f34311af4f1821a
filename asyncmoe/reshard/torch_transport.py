"""Messages over a torch.distributed process group (gloo between CPUs, NCCL between GPUs)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asyncmoe.errors import WaitTimeout

if TYPE_CHECKING:
    import torch
    import torch.distributed


class TorchTransport:
    """Point-to-point messages in a process group.

    All receives and sends of an exchange are posted before any is waited for, in the order of the ranks, so ranks that call
    `exchange` with the same plan cannot deadlock.

    Args:
        group: the process group; None: the default one.
        device: where message buffers live, "cpu" for gloo, "cuda" or "cuda:0" for NCCL.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None, device: str = "cpu") -> None:
        import torch
        import torch.distributed

        self._torch, self._group, self._device = torch, group, device
        self.rank = torch.distributed.get_rank(group)

    def empty(self, nbytes: int) -> torch.Tensor:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], timeout_s: float) -> None:
        """As `asyncmoe.reshard.exchange.Transport`.

        Raises:
            WaitTimeout: a message did not arrive, or was not taken, in time. The group cannot be used afterwards.
        """
        distributed = self._torch.distributed
        posts = [(distributed.irecv, rank, buffer, "its message") for rank, buffer in receives]
        posts += [(distributed.isend, rank, buffer, "it to take a message") for rank, buffer in sends]
        if not posts:
            return
        operations = [distributed.P2POp(post, buffer, group=self._group, group_peer=rank) for post, rank, buffer, _ in posts]
        works = distributed.batch_isend_irecv(operations)
        started = time.monotonic()
        # NCCL gives one handle for the whole batch, gloo one for each message.
        names = [(f"rank {rank}", what) for _, rank, _, what in posts] if len(works) == len(posts) else [(self._ranks(posts), "messages")]
        for work, (whom, what) in zip(works, names, strict=True):
            self._wait(work, whom, what, started, timeout_s)

    def _wait(self, work: torch.distributed.Work, whom: str, what: str, started: float, timeout_s: float) -> None:
        left = max(0.001, started + timeout_s - time.monotonic())
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            waited = time.monotonic() - started
            if waited < timeout_s:
                raise
            raise WaitTimeout(whom, f"{what} ({str(error).splitlines()[0]})", waited) from error

    @staticmethod
    def _ranks(posts: Sequence[tuple[Any, int, Any, str]]) -> str:
        return "ranks " + ", ".join(str(rank) for rank in sorted({rank for _, rank, _, _ in posts}))
