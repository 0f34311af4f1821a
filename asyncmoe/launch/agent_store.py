"""The store of torchrun's agents and ranks: a private file on one machine, an address across several.

torch's static rendezvous listens on every address of the first machine, and answers anyone, without a key. On one machine nothing needs to
listen.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous

from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.platform.file_store import open_store
from asyncmoe.rpc import address
from asyncmoe.rpc.environment import RANKS_STORE

_create: Any = static_tcp_rendezvous.create_rdzv_handler
_WHERE = "address at which trainer ranks meet"
_LOOPBACK = "127."
"""Beginning of loopback addresses (RFC 1122)."""


def install(folder: Path) -> None:
    """Replace torchrun's static rendezvous in this process.

    Args:
        folder: a new folder that only this user may enter. The ranks of one machine meet in a file there (`RANKS_STORE` in their
            environment names it); ranks of several machines meet at the trainer's address, and nothing listens elsewhere.
    """
    module: Any = static_tcp_rendezvous
    module.create_rdzv_handler = lambda params: _Static(_create(params), folder / "ranks")


def listen_on(master: str, nodes: int) -> str:
    """Return the address to listen on, as the first of `nodes` machines, for ranks that meet at `master`.

    A machine's own name may resolve to loopback in its /etc/hosts, and to its address elsewhere; then listen on every address.

    Raises:
        UserError: the name does not resolve.
    """
    found = address.resolve(_WHERE, master)
    return "0.0.0.0" if nodes > 1 and found != master and found.startswith(_LOOPBACK) else found


class _Static(static_tcp_rendezvous.StaticTCPRendezvous):
    def __init__(self, made: static_tcp_rendezvous.StaticTCPRendezvous, file: Path) -> None:
        super().__init__(made.master_addr, made.master_port, made.rank, made.world_size, made.run_id, int(made.timeout.total_seconds()))
        self._file = file

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises UserError if this machine, the first of several, does not have the address, AsyncmoeError if the port is taken."""
        if self._store is None and self.world_size == 1:
            self._store = open_store(self._file)
            os.environ[RANKS_STORE] = str(self._file)
            if self.master_addr.startswith(_LOOPBACK):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", address.LOOPBACK_INTERFACE)
        elif self._store is None and self.rank == 0:
            self._store = self._listen()
        return super().next_rendezvous()

    def _listen(self) -> Any:
        try:
            listener = socket.create_server((listen_on(self.master_addr, self.world_size), self.master_port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # not the user's error: the next start of the job or its trainer uses another port
                raise AsyncmoeError(f"{self.master_addr}:{self.master_port}, where trainer ranks meet, is in use") from error
            why = (error.strerror or str(error)).partition(" (")[0]  # Python repeats the address
            got, hint = f"{self.master_addr}:{self.master_port} ({why})", "see cluster.network and ASYNCMOE_HOST"
            raise UserError(_WHERE, got=got, expected="an address of this machine", hint=hint) from error
        store = cast(Any, dist).TCPStore
        fd = listener.detach()
        return store(self.master_addr, self.master_port, self.world_size, True, self.timeout, multi_tenant=True, master_listen_fd=fd)
