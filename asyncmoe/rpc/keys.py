"""The rendezvous file, which contains the keys of a run.

The controller generates two CURVE key pairs at every start (`asyncmoe.rpc.server`) and writes its address, its public key and the
client's pair to `run_dir/rendezvous.json`, readable only by its owner. Whoever can read that file is a member of the run; nobody else
passes the handshake, in either direction. The server's secret key never leaves the controller.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec

from asyncmoe.errors import UserError, WaitTimeout
from asyncmoe.rpc.connection import answers
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.storage import make_private, replace, writing

FILE_NAME = "rendezvous.json"
_POLL_S = 0.05
_PROBE_S = 2.0


def write(run_dir: Path, value: Rendezvous) -> Path:
    """Write `run_dir/rendezvous.json`, mode 0600, atomically replacing the file of a controller that has ended.

    Raises:
        UserError: see `refuse_another`.
        StorageError: the file cannot be written.
    """
    path, ours = run_dir / FILE_NAME, run_dir / f".{os.getpid()}.{FILE_NAME}"
    with writing("the controller's address", path):
        make_private(run_dir)
        try:
            replace(ours, msgspec.json.encode(value), durable=True, mode=0o600)
            # The check may take seconds, during which another controller may write its own file.
            ended = refuse_another(run_dir, value.address)
            while _parse(path) != ended:
                ended = refuse_another(run_dir, value.address)
            ours.replace(path)
        finally:
            ours.unlink(missing_ok=True)
    return path


def refuse_another(run_dir: Path, listening: str = "") -> Rendezvous | None:
    """Check that the run has no other live controller. Returns the rendezvous that an ended controller left in `run_dir`, or None.

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
    """Delete the file if it still contains `value`; a controller does so when it ends."""
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
            raise WaitTimeout("the controller", f"{found}; start the controller, or see its log", time.monotonic() - begin)
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
    except (FileNotFoundError, ValueError):
        return None
    except PermissionError as error:
        raise UserError(str(path), got=f"a file of another user ({error.strerror})", expected="a file that this user may read") from error
