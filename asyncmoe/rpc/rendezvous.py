"""The controller's address, and the keys for connecting to it."""

from __future__ import annotations

import hashlib

import msgspec
from zmq.utils import z85


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address and keys with which a client reaches the controller. Keys are Z85 text, 40 characters."""

    address: str
    """In ZeroMQ's notation: "tcp://10.1.0.3:41234", or the Unix socket's address if there is no port."""
    server_public: str
    client_public: str
    client_secret: str
    host: str
    pid: int
    """The controller's process ID on `host`, only for error messages, because IDs are reused."""
    started: float
    """Unix seconds."""
    local_dir: str = ""
    """Directory of the Unix socket for clients on the same host; empty: no such socket."""
    local_secret: str = ""
    """Password of clients on the Unix socket."""

    def __repr__(self) -> str:
        return f"Rendezvous({self.address}, controller {self.host}:{self.pid})"

    def derived_key(self, name: str) -> str:
        """Return a secret CURVE key that follows from a name and the run's keys; as Z85 text."""
        return z85.encode(hashlib.blake2b(name.encode(), key=self.client_secret.encode(), digest_size=32).digest()).decode()

    @property
    def controller(self) -> str:
        """The controller's name in error messages."""
        return f"the controller at {self.address} (process {self.pid} on {self.host})"
