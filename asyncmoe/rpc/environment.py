"""The controller's address and keys from environment variables, for runs whose machines share no directory.

    export ASYNCMOE_CONTROLLER=tcp://node1:41234 ASYNCMOE_KEYS=$(openssl rand -hex 32)

in every process of the run, the controller included. All keys, including the server's, derive from this one secret: whoever knows the
secret is a member of the run and could also impersonate its controller. No message shows the secret.

ASYNCMOE_TRAINER_EPOCH is the launchers' own: it tells a trainer's ranks, and a controller, how often the trainer was started again in
place. So are ASYNCMOE_RANKS_STORE, which tells the ranks in which file they meet, ASYNCMOE_AGENT, which tells them whose children they
are, and ASYNCMOE_STARTS, which tells an engine how often it was started.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncmoe.errors import UserError

CONTROLLER, KEYS = "ASYNCMOE_CONTROLLER", "ASYNCMOE_KEYS"
STARTS = "ASYNCMOE_STARTS"
"""How often the launcher has started this engine before, without the restarts of its own; absent or 0: this is its first start."""
TRAINER_EPOCH = "ASYNCMOE_TRAINER_EPOCH"
"""How often the launcher has started the trainer again in place; absent or 0: this is its first start."""
AGENT = "ASYNCMOE_AGENT"
"""Process id of the torchrun that started this rank, which has another parent once that torchrun is killed."""
RANKS_STORE = "ASYNCMOE_RANKS_STORE"
"""File of the store (torch's `FileStore`) in which all ranks of a trainer meet; absent: torchrun's address (MASTER_ADDR)."""
_MAKE_KEYS = f"export {KEYS}=$(openssl rand -hex 32) once, and give every process of the run the same"
_ADDRESS = re.compile(r"tcp://([A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})")
_HERE = "localhost"
ANY = "0.0.0.0"


@dataclass(frozen=True)
class RendezvousVariables:
    """The parsed environment variables: the controller's host and port, and 32 secret bytes."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    @property
    def address(self) -> str:
        """The address in ZeroMQ's notation."""
        return f"tcp://{self.host}:{self.port}"


def given(environment: Mapping[str, str] = os.environ) -> RendezvousVariables | None:
    """Return the controller's address and secret; None if both variables are unset or empty.

    Raises:
        UserError: only one variable is set, or a value is malformed.
    """
    address, secret = environment.get(CONTROLLER, ""), environment.get(KEYS, "")
    if not address and not secret:
        return None
    if not secret:
        raise UserError(KEYS, got=f"nothing, although {CONTROLLER} is set", expected="64 hexadecimal digits", hint=_MAKE_KEYS)
    if not address:
        raise UserError(
            CONTROLLER,
            got=f"nothing, although {KEYS} is set",
            expected="tcp://HOST:PORT of the controller",
            hint=f"set it in every process of the run, or unset {KEYS} to meet by the run directory",
        )
    return RendezvousVariables(*_address(address), _secret(secret))


def trainer_epoch(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started this process's trainer again in place. Raises as `starts_before`."""
    return _count(TRAINER_EPOCH, environment)


def starts_before(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started this engine before.

    Raises:
        UserError: the variable is no such number.
    """
    return _count(STARTS, environment)


def _count(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "") or "0"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UserError(name, got=repr(text), expected="a number from 0, of earlier starts", hint="only launchers set it: unset it")
    return int(text)


def listen_on(host: str) -> str:
    """Return the local address to listen on so that other machines reach this one as `host`.

    A name that resolves to loopback here may resolve to this machine's real address elsewhere (Debian writes such a line into
    /etc/hosts); for such a name the result is every address.

    Raises:
        UserError: the name does not resolve.
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
            CONTROLLER, got=repr(text), expected="tcp://HOST:PORT, a name or IPv4 address and a port from 1 to 65535", hint="correct it"
        )
    return matched[1], int(matched[2])


def _secret(text: str) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        others = sum(c not in "0123456789abcdefABCDEF" for c in text)
        got = f"{len(text)} characters" + (f", {others} of them no hexadecimal digits" if others else "")
        raise UserError(KEYS, got=got, expected="64 hexadecimal digits", hint=_MAKE_KEYS)
    return bytes.fromhex(text)
