"""The store of torchrun's agents and ranks, on one address.

torch's static rendezvous listens on every address of the first machine, and answers whoever reaches it: no key is asked for.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, static_tcp_rendezvous

from asyncmoe.errors import UserError

_create: Any = static_tcp_rendezvous.create_rdzv_handler


def install() -> None:
    """Have torchrun's static rendezvous in this process listen only on the address at which its ranks meet."""
    module: Any = static_tcp_rendezvous
    module.create_rdzv_handler = _create_here


def listen_on(master: str, nodes: int) -> str:
    """Return the address to listen on, as the first of `nodes` machines, for ranks that meet at `master`.

    A machine's own name may stand for loopback in its /etc/hosts, and for its address elsewhere; then this is every address.

    Raises:
        UserError: the name does not resolve.
    """
    try:
        found = socket.gethostbyname(master)
    except OSError as error:
        raise _unusable(master, error) from error
    return "0.0.0.0" if nodes > 1 and found != master and ipaddress.ip_address(found).is_loopback else found


class _Static(static_tcp_rendezvous.StaticTCPRendezvous):
    def next_rendezvous(self) -> RendezvousInfo:
        """Raises UserError if this machine, the first, does not have the address or the port is taken."""
        if self.rank == 0 and self._store is None:
            try:
                listener = socket.create_server((listen_on(self.master_addr, self.world_size), self.master_port))
            except OSError as error:
                raise _unusable(f"{self.master_addr}:{self.master_port}", error) from error
            self._store = cast(Any, dist).TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                True,
                self.timeout,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        return super().next_rendezvous()


def _create_here(params: RendezvousParameters) -> _Static:
    made = _create(params)
    return _Static(made.master_addr, made.master_port, made.rank, made.world_size, made.run_id, int(made.timeout.total_seconds()))


def _unusable(where: str, error: OSError) -> UserError:
    hint = "see cluster.network and ASYNCMOE_HOST, or what else listens there"
    why = (error.strerror or str(error)).partition(" (")[0]  # Python repeats the address
    return UserError("address at which trainer ranks meet", got=f"{where} ({why})", expected="one of this machine", hint=hint)
