"""The address at which other machines reach this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

from asyncmoe.errors import UserError
from asyncmoe.process import boot_id

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
VARIABLE = "ASYNCMOE_HOST"


def reachable(network: str) -> str:
    """Return this machine's address in `network` (`cluster.network`); the environment variable ASYNCMOE_HOST takes precedence.

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
    """Return whether the run may span several machines, so that other machines must reach this one."""
    return network != "loopback" or bool(os.environ.get(VARIABLE))


def resolve(what: str, host: str) -> str:
    """Return the IPv4 address of a host name.

    Raises:
        UserError: the name does not resolve.
    """
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        hint = "name an interface or a network in cluster.network, or set ASYNCMOE_HOST to an address"
        raise UserError(what, got=f"{host!r} ({error.strerror or error})", expected="a resolvable host name", hint=hint) from error


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of every interface of this machine."""
    import psutil

    found = psutil.net_if_addrs()
    return {name: [a.address for a in addresses if a.family == socket.AF_INET] for name, addresses in found.items()}


def choose(network: str, found: Mapping[str, Sequence[str]]) -> str:
    """Return the first address of an interface, or the first address inside a network.

    Args:
        network: "ib0" or "10.1.0.0/16".
        found: addresses of each interface.

    Raises:
        UserError: no address matches.
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
    """Return this machine's source address on the route to `host`. Sends nothing.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def host_id() -> str:
    """Return an ID that is equal for processes that share memory through /dev/shm: same kernel, same mount of /dev/shm."""
    return f"{boot_id()}-{os.stat('/dev/shm').st_dev}"
