"""At which address other machines reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

from asyncmoe.errors import UserError

LOOPBACK = "127.0.0.1"
VARIABLE = "ASYNCMOE_HOST"


def reachable(network: str) -> str:
    """An address of this machine, as `cluster.network` says; that in the environment variable ASYNCMOE_HOST wins.

    Raises:
        UserError: this machine has no such address.
    """
    given = os.environ.get(VARIABLE)
    if given:
        return resolve(VARIABLE, given)
    if network == "loopback":
        return LOOPBACK
    if network == "hostname":
        return resolve("cluster.network: hostname", socket.gethostname())
    return choose(network, interfaces())


def several(network: str) -> bool:
    """Whether processes of other machines are to reach this one: the run is not on one machine alone."""
    return network != "loopback" or bool(os.environ.get(VARIABLE))


def resolve(what: str, host: str) -> str:
    """The IPv4 address a name stands for.

    Raises:
        UserError: it stands for none.
    """
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        cure = "name an interface or a network in cluster.network, or set ASYNCMOE_HOST to an address"
        raise UserError(
            what, got=f"{host!r} ({error.strerror or error})", expected="a name that stands for an address", cure=cure
        ) from error


def interfaces() -> dict[str, list[str]]:
    """IPv4 addresses of every interface of this machine."""
    import psutil

    found = psutil.net_if_addrs()
    return {name: [a.address for a in addresses if a.family == socket.AF_INET] for name, addresses in found.items()}


def choose(network: str, found: Mapping[str, Sequence[str]]) -> str:
    """The first address of an interface, or the first that lies in a network.

    Args:
        network: "ib0" or "10.1.0.0/16".
        found: addresses of each interface.

    Raises:
        UserError: there is none.
    """
    if found.get(network):
        return found[network][0]
    every = [address for addresses in found.values() for address in addresses]
    try:
        wanted = ipaddress.ip_network(network)
    except ValueError:
        wanted = None
    inside = [address for address in every if wanted is not None and ipaddress.ip_address(address) in wanted]
    if not inside:
        there = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in found.items() if addresses)
        expected = f"loopback, hostname, an interface or a network of {socket.gethostname()}, which has {there}"
        raise UserError("cluster.network", got=repr(network), expected=expected)
    return inside[0]


def towards(host: str, port: int) -> str:
    """Our own address on the way to `host`. Nothing is sent.

    Raises:
        OSError: there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def host_id() -> str:
    """The same for two processes that can share memory through /dev/shm: one kernel, and one mount of it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{boot.read().strip()}-{os.stat('/dev/shm').st_dev}"
