"""Who may talk to a run, and where: the keys and the rendezvous file.

The controller makes two CURVE key pairs at every start and writes the address, its public key and the client's pair to
`run_dir/rendezvous.json`, readable by its owner only. Whoever can read that file is a member of the run; nobody else gets past
the handshake, in either direction. The server's secret key never leaves the controller.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from asyncmoe.errors import UserError, WaitTimeout
from asyncmoe.wire.connection import answers

FILE_NAME = "rendezvous.json"
_POLL_S = 0.05
_PROBE_S = 2.0


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client needs to reach the controller. Keys are Z85 text, 40 characters."""

    address: str
    """As ZeroMQ writes it: "tcp://127.0.0.1:41234"."""
    server_public: str
    client_public: str
    client_secret: str
    host: str
    pid: int
    """Process of the controller on `host`, for the reader's error messages only: a pid can be taken again."""
    started: float
    """Unix seconds."""
    local_dir: str = ""
    """Directory of the Unix socket for clients on the same host; empty: there is none."""
    local_secret: str = ""
    """What a client proves itself with on that socket."""

    def __repr__(self) -> str:
        return f"Rendezvous({self.address}, controller {self.host}:{self.pid})"


@dataclass(frozen=True)
class RunKeys:
    """Both key pairs of a run, of which only the controller holds all, and the secret of its Unix socket."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)
    local_secret: str = field(repr=False)


def generate() -> RunKeys:
    """New random keys, from libsodium."""
    return RunKeys(*zmq.curve_keypair(), *zmq.curve_keypair(), secrets.token_urlsafe(32))


def rendezvous(address: str, keys: RunKeys, local_dir: str = "") -> Rendezvous:
    """What the process that calls this hands to its clients."""
    return Rendezvous(
        address=address,
        server_public=keys.server_public.decode(),
        client_public=keys.client_public.decode(),
        client_secret=keys.client_secret.decode(),
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.time(),
        local_dir=local_dir,
        local_secret=keys.local_secret,
    )


def write(run_dir: Path, value: Rendezvous) -> Path:
    """Put `value` at `run_dir/rendezvous.json`, mode 0600, in one atomic step over whatever a previous run left there."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path, temporary = run_dir / FILE_NAME, run_dir / f".{FILE_NAME}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def remove(run_dir: Path, value: Rendezvous) -> None:
    """Take the file away if it is still `value`; a controller does so as it ends."""
    path = run_dir / FILE_NAME
    if _parse(path) == value:
        path.unlink(missing_ok=True)


def read(run_dir: Path, wait_s: float) -> Rendezvous:
    """The rendezvous of a controller that answers.

    Waits for the file and for the controller behind it: a file left by a run that has ended (nobody there, or somebody with
    other keys) is passed over until it is replaced.

    Raises:
        WaitTimeout: no controller answered within `wait_s` seconds; says what was found instead.
        UserError: the file may not be read by this user.
    """
    path = run_dir / FILE_NAME
    begin = time.monotonic()
    deadline = begin + wait_s
    found = f"{path} does not exist"
    while True:
        value = _parse(path)
        if value is not None:
            left = deadline - time.monotonic()
            if answers(value, min(_PROBE_S, max(left, _POLL_S))):
                return value
            age = time.time() - value.started
            found = f"{path} was written {age:.0f} s ago by process {value.pid} on {value.host}, and nobody with its keys answers"
        elif path.exists():
            found = f"{path} is not a rendezvous file"
        if time.monotonic() >= deadline:
            raise WaitTimeout("the controller", f"{found}; start it, or see its log", time.monotonic() - begin)
        time.sleep(_POLL_S)


def _parse(path: Path) -> Rendezvous | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rendezvous)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise UserError(str(path), got=f"a file of another user ({error.strerror})", expected="a file this user may read") from error
    except ValueError:
        return None
