"""torch's TCP store for a rendezvous, listening on one address only.

By default torch listens on every interface of the first rank's machine (`TCPStore` without `master_listen_fd`), and accepts any client
without a key.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

import torch.distributed as dist


def open_store(host_name: str, port: int, *, is_master: bool = False, **named: Any) -> Any:
    """Open a `TCPStore`, with the arguments of torch's class.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    if is_master:
        family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
        named["master_listen_fd"] = socket.create_server((host_name, port), family=family).detach()
    c10d: Any = dist
    return c10d.TCPStore(host_name, port, is_master=is_master, **named)


def install() -> None:
    """Use `open_store` for this process's `tcp://` addresses."""
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    module.TCPStore = open_store
