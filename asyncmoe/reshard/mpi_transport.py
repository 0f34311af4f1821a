"""Messages over MPI, through mpi4py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncmoe.errors import ConfigError, WaitTimeout

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 0x4D6F


class MpiTransport:
    """Point-to-point messages in a duplicate of a communicator, so that they cannot mix with the program's other messages.

    The constructor is collective over the communicator.

    Args:
        communicator: the communicator to duplicate; None: MPI.COMM_WORLD.

    Raises:
        ConfigError: mpi4py is not installed, or MPI was initialised for only one thread.
    """

    def __init__(self, communicator: MPI.Comm | None = None) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI library
            raise ConfigError("MPI", got=str(error), expected="mpi4py and an MPI library", hint="pip install mpi4py") from error
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ConfigError("MPI", got="a library started for one thread", expected="MPI_THREAD_SERIALIZED or more")
        self._mpi: Any = MPI
        self._communicator = (communicator or MPI.COMM_WORLD).Dup()
        self.rank: int = self._communicator.Get_rank()

    def empty(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def exchange(self, sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]], timeout_s: float) -> None:
        """As `asyncmoe.reshard.transport.Transport`.

        Raises:
            WaitTimeout: a message did not arrive, or its peer did not receive it, in time. The communicator is unusable afterwards.
        """
        requests = [self._communicator.Irecv([buffer, self._mpi.BYTE], rank, _TAG) for rank, buffer in receives]
        requests += [self._communicator.Isend([buffer, self._mpi.BYTE], rank, _TAG) for rank, buffer in sends]
        whom = [(rank, "its message") for rank, _ in receives] + [(rank, "to take a message") for rank, _ in sends]
        started, pause = time.monotonic(), 0.0
        while not self._mpi.Request.Testall(requests):
            waited = time.monotonic() - started
            if waited > timeout_s:
                late = next(i for i, request in enumerate(requests) if not request.Test())
                raise WaitTimeout(f"rank {whom[late][0]}", whom[late][1], waited)
            time.sleep(pause)  # MPI's own wait has no timeout and would occupy the core
            pause = min(0.001, pause + 0.00002)
