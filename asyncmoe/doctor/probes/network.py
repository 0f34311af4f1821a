"""Host names, addresses and ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from asyncmoe.doctor.facts import Network, WantedPort
from asyncmoe.doctor.probes.call_with_timeout import Later
from asyncmoe.errors import WaitTimeout

_RESOLVE_S = 15.0
_CONNECT_S = 5.0
_CHOOSING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def look() -> Network:
    """Return the network facts of this host."""
    addresses, trouble = resolve(socket.gethostname())
    low, high = map(int, _EPHEMERAL.read_text().split()) if _EPHEMERAL.is_file() else Network.ephemeral
    return Network(
        addresses=addresses,
        name_trouble=trouble,
        loopback_trouble=_loopback(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        chosen={name: os.environ[name] for name in _CHOOSING if os.environ.get(name)},
        ephemeral=(low, high),
    )


def resolve(name: str) -> tuple[tuple[str, ...], str | None]:
    """Return the addresses of a name, or the reason why there are none."""
    asked = Later(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    try:
        found = asked.result("the name service", f"the addresses of {name}", _RESOLVE_S)
    except (OSError, WaitTimeout) as error:
        return (), str(error)
    # A link-local IPv6 address ends with % and the interface.
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)), None


def try_ports(wanted: Sequence[tuple[str, str, int]]) -> tuple[WantedPort, ...]:
    """Test whether the ports, each (key, host, number), can be listened on."""
    return tuple(WantedPort(key, host, number, _refused(host, number)) for key, host, number in wanted)


def _refused(host: str, number: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as tried:
            # Servers set it too, so connections of a finished server in TIME_WAIT are no obstacle.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _loopback() -> str | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), _CONNECT_S):
            return None
    except OSError as error:
        return error.strerror or str(error)
