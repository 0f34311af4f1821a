"""The keys of a run and the rendezvous file.

The controller generates two CURVE key pairs at every start and writes its address, its public key and the client's pair to
`run_dir/rendezvous.json`, readable only by its owner. Whoever can read that file is a member of the run; nobody else passes
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
from asyncmoe.rpc.connection import answers
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.storage import make_private, writing

FILE_NAME = "rendezvous.json"
_POLL_S = 0.05
_PROBE_S = 2.0


@dataclass(frozen=True)
class RunKeys:
    """Both key pairs of a run and the secret of its Unix socket. Only the controller holds all of them."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)
    local_secret: str = field(repr=False)


def generate() -> RunKeys:
    """Generate random keys; libsodium makes the key pairs."""
    return RunKeys(*zmq.curve_keypair(), *zmq.curve_keypair(), secrets.token_urlsafe(32))


def rendezvous(address: str, keys: RunKeys, local_dir: str = "") -> Rendezvous:
    """Build the rendezvous of the calling process, for its clients."""
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
    """Write `run_dir/rendezvous.json`, mode 0600; atomically replaces the file of a controller that has ended.

    Raises:
        UserError: see `refuse_another`.
        StorageError: the file cannot be written.
    """
    path, temporary = run_dir / FILE_NAME, run_dir / f".{FILE_NAME}.{os.getpid()}"
    with writing("the controller's address", path):
        try:
            _private(temporary, value)
            # The check may take seconds, in which another controller may write its own file.
            ended = refuse_another(run_dir, value.address)
            while _parse(path) != ended:
                ended = refuse_another(run_dir, value.address)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _private(path: Path, value: Rendezvous) -> None:
    """Write a new file, mode 0600, to the disk."""
    make_private(path.parent)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())


def refuse_another(run_dir: Path, listening: str = "") -> Rendezvous | None:
    """Ensure that the run has no other live controller. Returns the rendezvous that an ended controller left in `run_dir`, or None.

    A controller that listens on loopback on another machine cannot be distinguished from one that has ended.

    Args:
        listening: the address this process listens on; no other controller can have it.

    Raises:
        UserError: another controller of the run answers.
    """
    value = _parse(run_dir / FILE_NAME)
    if value is not None and value.address != listening and answers(value, _PROBE_S):
        raise UserError(
            str(run_dir),
            got=f"a second controller, process {os.getpid()} on {socket.gethostname()}, beside process {value.pid} on {value.host}, "
            f"which answers at {value.address}",
            expected="one controller of a run",
            hint="stop the other controller, or choose another run.dir",
        )
    return value


def remove(run_dir: Path, value: Rendezvous) -> None:
    """Delete the file if it still holds `value`; a controller does so when it ends."""
    path = run_dir / FILE_NAME
    if _parse(path) == value:
        path.unlink(missing_ok=True)


def read(run_dir: Path, wait_s: float) -> Rendezvous:
    """Return the rendezvous of a controller that answers.

    Waits for the file and for its controller: a stale file of an ended run (nobody answers, or a process with other keys) is ignored
    until it is replaced.

    Raises:
        WaitTimeout: no controller answered within `wait_s` seconds; the message says what was found instead.
        UserError: this user may not read the file.
    """
    begin = time.monotonic()
    deadline = begin + wait_s
    while True:
        value = _parse(run_dir / FILE_NAME)
        left = deadline - time.monotonic()
        if value is not None and answers(value, min(_PROBE_S, max(left, _POLL_S))):
            return value
        if time.monotonic() >= deadline:
            found = _found(run_dir / FILE_NAME, value)
            raise WaitTimeout("the controller", f"{found}; start it, or see its log", time.monotonic() - begin)
        time.sleep(_POLL_S)


def _found(path: Path, value: Rendezvous | None) -> str:
    """Explain why the file did not lead to a controller."""
    if value is not None:
        age = time.time() - value.started
        return f"{path} was written {age:.0f} s ago by process {value.pid} on {value.host}, and nobody with its keys answers"
    return f"{path} is not a rendezvous file" if path.exists() else f"{path} does not exist"


def _parse(path: Path) -> Rendezvous | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rendezvous)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise UserError(str(path), got=f"a file of another user ({error.strerror})", expected="a file this user may read") from error
    except ValueError:
        return None
