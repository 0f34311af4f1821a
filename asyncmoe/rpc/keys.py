"""Who may talk to a run, and where: the keys and the rendezvous file.

The controller makes two CURVE key pairs at every start and writes the address, its public key and the client's pair to
`run_dir/rendezvous.json`, readable by its owner only. Whoever can read that file is a member of the run; nobody else gets past
the handshake, in either direction. The server's secret key never leaves the controller.

Where the environment gives address and secret (`asyncmoe.rpc.environment`), no file is needed: every process derives the same keys.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from asyncmoe.errors import UserError, WaitTimeout
from asyncmoe.rpc import environment
from asyncmoe.rpc.connection import answers
from asyncmoe.rpc.environment import CONTROLLER, KEYS, RendezvousVariables
from asyncmoe.storage import writing

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
    """Process of the controller on `host`, for the reader's error messages only: a pid can be taken again. 0: not known."""
    started: float
    """Unix seconds."""
    local_dir: str = ""
    """Directory of the Unix socket for clients on the same host; empty: there is none."""
    local_secret: str = ""
    """What a client proves itself with on that socket."""

    def __repr__(self) -> str:
        return f"Rendezvous({self.address}, controller {self.host}:{self.pid})"

    @property
    def controller(self) -> str:
        """What error messages call it."""
        return f"the controller at {self.address} ({f'process {self.pid} on {self.host}' if self.pid else CONTROLLER})"


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


def derive(secret: bytes) -> RunKeys:
    """The keys of everybody who knows `secret` (32 bytes): HMAC-SHA256 of a label for each, of which 32 bytes are a CURVE secret key."""

    def pair(label: str) -> tuple[bytes, bytes]:
        key: bytes = z85.encode(_derived(secret, label))
        return zmq.curve_public(key), key

    return RunKeys(*pair("server"), *pair("client"), _derived(secret, "local").hex())


def _derived(secret: bytes, label: str) -> bytes:
    return hmac.digest(secret, f"asyncmoe {label} key".encode(), "sha256")


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
    """Put `value` at `run_dir/rendezvous.json`, mode 0600, in one atomic step over what a controller that has ended left there.

    Raises:
        UserError: see `refuse_another`.
        StorageError: it could not be written.
    """
    with writing("the controller's address", run_dir / FILE_NAME):
        return _write(run_dir, value)


def _write(run_dir: Path, value: Rendezvous) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path, temporary = run_dir / FILE_NAME, run_dir / f".{FILE_NAME}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            os.fsync(file.fileno())
        # Asking takes up to seconds, in which another may have written its own.
        ended = refuse_another(run_dir, value.address)
        while _parse(path) != ended:
            ended = refuse_another(run_dir, value.address)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def refuse_another(run_dir: Path, listening: str = "") -> Rendezvous | None:
    """What a controller that has ended has left in `run_dir`, or None: a run has one controller.

    One that listens on loopback on another machine cannot be told from one that has ended.

    Args:
        listening: the address this process listens on, which no other has then.

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
            cure="end the other, or give this run a directory of its own (run.dir)",
        )
    return value


def remove(run_dir: Path, value: Rendezvous) -> None:
    """Take the file away if it is still `value`; a controller does so as it ends."""
    path = run_dir / FILE_NAME
    if _parse(path) == value:
        path.unlink(missing_ok=True)


def read(run_dir: Path, wait_s: float) -> Rendezvous:
    """The rendezvous of a controller that answers.

    Waits for the file and for the controller behind it: a file left by a run that has ended (nobody there, or somebody with
    other keys) is passed over until it is replaced. Where the environment says where the controller is, no file is looked for.

    Raises:
        WaitTimeout: no controller answered within `wait_s` seconds; says what was found instead.
        UserError: the file may not be read by this user, or the environment is wrong.
    """
    given = environment.given()
    begin = time.monotonic()
    deadline = begin + wait_s
    while True:
        value = _parse(run_dir / FILE_NAME) if given is None else of(given)
        left = deadline - time.monotonic()
        if value is not None and answers(value, min(_PROBE_S, max(left, _POLL_S))):
            return value
        if time.monotonic() >= deadline:
            found = _found(run_dir / FILE_NAME, value) if given is None else _found_at(given)
            raise WaitTimeout("the controller", f"{found}; start it, or see its log", time.monotonic() - begin)
        time.sleep(_POLL_S)


def of(given: RendezvousVariables) -> Rendezvous:
    """What a client makes of the environment."""
    return msgspec.structs.replace(rendezvous(given.address, derive(given.secret)), host=given.host, pid=0)


def _found(path: Path, value: Rendezvous | None) -> str:
    """Why the file led to nobody."""
    if value is not None:
        age = time.time() - value.started
        return f"{path} was written {age:.0f} s ago by process {value.pid} on {value.host}, and nobody with its keys answers"
    return f"{path} is not a rendezvous file" if path.exists() else f"{path} does not exist"


def _found_at(given: RendezvousVariables) -> str:
    """Why the environment led to nobody."""
    try:
        socket.create_connection((given.host, given.port), _PROBE_S).close()
    except OSError as error:
        return f"{CONTROLLER} is {given.address}, which cannot be reached from {socket.gethostname()} ({error.strerror or error})"
    return f"{CONTROLLER} is {given.address}, and what listens there has not the keys of {KEYS}"


def _parse(path: Path) -> Rendezvous | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rendezvous)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise UserError(str(path), got=f"a file of another user ({error.strerror})", expected="a file this user may read") from error
    except ValueError:
        return None
