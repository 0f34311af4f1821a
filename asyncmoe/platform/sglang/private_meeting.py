"""Rendezvous of a server's processes in its private folder (`asyncmoe.scratch`), instead of on ports that require no key.

SGLang's other sockets between its processes are files in the folder for temporary files, which is the private folder. With data-parallel
attention they are ports of loopback near the server's own, which become files here too; those between machines are encrypted.
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
NODES_KEY = "ASYNCMOE_NODES_KEY"
"""Environment variable of an engine over several machines: the secret key, as Z85 text, of the sockets between its servers."""


def install() -> None:
    """Patch every rendezvous of a server's processes. Call it before the import of SGLang."""
    after_import("sglang.srt.model_executor.model_runner_components.weight_updater", _mend_groups)
    if key := os.environ.get(NODES_KEY):
        _encrypt(key.encode())
    if os.environ.get(VARIABLE):
        after_import("sglang.srt.distributed.device_communicators.shm_broadcast", _mend_queues)
        after_import("sglang.srt.server_args", _mend_ports)
        after_import("sglang.srt.managers.data_parallel_controller", _mend_controller)


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


def _encrypt(secret: bytes) -> None:
    """Encrypt the sockets on ports, with CURVE. A peer must know the public key, which follows from the secret one and is sent nowhere."""
    public, bind, connect = zmq.curve_public(secret), zmq.Socket.bind, zmq.Socket.connect

    def of(server: bool, act: Any) -> Any:
        def made(self: Any, addr: str) -> Any:
            if addr.startswith("tcp://"):
                self.curve_secretkey, self.curve_publickey = secret, public
                self.setsockopt(*((zmq.CURVE_SERVER, 1) if server else (zmq.CURVE_SERVERKEY, public)))
            return act(self, addr)

        return made

    zmq.Socket.bind, zmq.Socket.connect = of(True, bind), of(False, connect)  # type: ignore[method-assign]


def _mend_ports(module: Any) -> None:
    owner, init_new = module.PortArgs, module.PortArgs.init_new

    def in_files(*arguments: Any, **named: Any) -> Any:
        made = init_new(*arguments, **named)
        for name, value in vars(made).items():
            if str(value).startswith(f"{_LOOPBACK}:"):
                setattr(made, name, _file(int(value.rpartition(":")[2])))
        return made

    owner.init_new, module.wait_port_available = staticmethod(in_files), lambda *_: None


def _mend_controller(module: Any) -> None:
    """Let the process that distributes requests over data-parallel ranks reach them through files, and tell the files to other machines
    only."""
    owner, tell, bind = module.DataParallelController, module.DataParallelController._broadcast_worker_ports, module.get_zmq_socket_on_host

    def told(self: Any, server_args: Any, worker_ports: list[int] | None = None) -> Any:
        return worker_ports if server_args.dist_init_addr is None else tell(self, server_args, worker_ports)

    owner._broadcast_worker_ports = told
    module.get_zmq_socket_on_host = lambda _, *arguments, **named: bind(_Context.instance(), *arguments, **named)


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
