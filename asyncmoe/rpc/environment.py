"""The controller's address and keys by the environment, where no directory is shared by all machines of a run.

    export ASYNCMOE_CONTROLLER=tcp://node1:41234 ASYNCMOE_KEYS=$(openssl rand -hex 32)

in every process of the run, the controller's included. All keys derive from the one secret, the server's too: who knows it is a member
of the run and could also stand in for its controller. It is shown in no message.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncmoe.errors import UserError

CONTROLLER, KEYS = "ASYNCMOE_CONTROLLER", "ASYNCMOE_KEYS"
_MAKE_KEYS = f"export {KEYS}=$(openssl rand -hex 32) once, and give every process of the run the same"
_ADDRESS = re.compile(r"tcp://([A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})")
_HERE = "localhost"
ANY = "0.0.0.0"


@dataclass(frozen=True)
class RendezvousVariables:
    """What the environment says: where the controller is, and 32 secret bytes."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    @property
    def address(self) -> str:
        """As ZeroMQ writes it."""
        return f"tcp://{self.host}:{self.port}"


def given(environment: Mapping[str, str] = os.environ) -> RendezvousVariables | None:
    """The controller's address and secret; None where neither variable is set (or both are empty).

    Raises:
        UserError: one without the other, or one that cannot be.
    """
    address, secret = environment.get(CONTROLLER, ""), environment.get(KEYS, "")
    if not address and not secret:
        return None
    if not secret:
        raise UserError(KEYS, got=f"nothing beside {CONTROLLER}", expected="64 hexadecimal digits", cure=_MAKE_KEYS)
    if not address:
        raise UserError(
            CONTROLLER,
            got=f"nothing beside {KEYS}",
            expected="tcp://HOST:PORT of the controller",
            cure=f"set it in every process of the run, or unset {KEYS} to meet by the run directory",
        )
    return RendezvousVariables(*_address(address), _secret(secret))


def listen_on(host: str) -> str:
    """The address of this machine to listen on, for others to reach it as `host`.

    A name that stands for loopback here may stand for this machine's real address elsewhere (Debian writes such a line into /etc/hosts),
    so there it is every address.

    Raises:
        UserError: nobody knows the name.
    """
    try:
        found = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise UserError(
            CONTROLLER,
            got=f"{host}, which {socket.gethostname()} does not know ({error.strerror})",
            expected="a name or IPv4 address of the controller's machine",
        ) from error
    is_address = host == found
    return ANY if found.startswith("127.") and not is_address and host != _HERE else found


def _address(text: str) -> tuple[str, int]:
    matched = _ADDRESS.fullmatch(text)
    if matched is None or not 0 < int(matched[2]) < 1 << 16:
        raise UserError(
            CONTROLLER, got=repr(text), expected="tcp://HOST:PORT, a name or IPv4 address and a port from 1 to 65535", cure="correct it"
        )
    return matched[1], int(matched[2])


def _secret(text: str) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        others = sum(c not in "0123456789abcdefABCDEF" for c in text)
        got = f"{len(text)} characters" + (f", {others} of them no hexadecimal digits" if others else "")
        raise UserError(KEYS, got=got, expected="64 hexadecimal digits", cure=_MAKE_KEYS)
    return bytes.fromhex(text)
