"""Rendezvous of a server's processes in its private folder (`asyncmoe.scratch`), instead of on ports that require no key.

SGLang's other sockets between its processes are files in the folder for temporary files, which is the private folder.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Sequence
from typing import Any

import zmq

from asyncmoe.platform.sglang.patching import after_import
from asyncmoe.scratch import VARIABLE

_ADDRESS, _INTERFACE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "GLOO_SOCKET_IFNAME"
_LOOPBACK = "tcp://127.0.0.1"


def install() -> None:
    """Patch both rendezvous of workers. Call it before the import of SGLang."""
    after_import("sglang.srt.model_executor.model_runner_components.weight_updater", _mend_groups)
    if os.environ.get(VARIABLE):
        after_import("sglang.srt.distributed.device_communicators.shm_broadcast", _mend_queues)


def prepare(arguments: Sequence[str]) -> None:
    """Set, in the server's main process, its workers' rendezvous and the interface on which their process groups listen.

    Args:
        arguments: the server's arguments. In a run on one machine the server listens on loopback, and so do its workers.
    """
    if os.environ.get(VARIABLE) and "--dist-init-addr" not in arguments:
        os.environ.setdefault(_ADDRESS, f"file://{tempfile.gettempdir()}/workers")
    if "127.0.0.1" in arguments:
        os.environ.setdefault(_INTERFACE, "lo")


def _mend_groups(module: Any) -> None:
    """Let workers join a weight group through a file, named by its path in place of a host, then `:0` for the port."""
    join = module.init_custom_process_group

    def join_in_file(*, init_method: str, **named: Any) -> Any:
        if init_method.startswith("tcp:///"):
            init_method = f"file://{init_method.removeprefix('tcp://').removesuffix(':0')}"
        return join(init_method=init_method, **named)

    module.init_custom_process_group = join_in_file


def _mend_queues(module: Any) -> None:
    """Make the queue that forwards requests between workers (`MessageQueue`, which unpickles messages) use a Unix socket."""
    module.Context = _Context


class _Socket(zmq.Socket[bytes]):
    """A socket that maps port numbers on loopback to file names."""

    def bind_to_random_port(self, addr: str, *arguments: Any, **named: Any) -> int:
        if addr != _LOOPBACK:
            return super().bind_to_random_port(addr, *arguments, **named)
        number = secrets.randbits(62)
        self.bind(_file(number))
        return number

    def connect(self, addr: str) -> Any:
        return super().connect(_file(int(addr.rpartition(":")[2])) if addr.startswith(f"{_LOOPBACK}:") else addr)


class _Context(zmq.Context[_Socket]):
    _socket_class = _Socket


def _file(number: int) -> str:
    return f"ipc://{tempfile.gettempdir()}/queue-{number}"
