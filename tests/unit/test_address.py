"""A machine's address for other machines."""

from __future__ import annotations

import socket

import pytest

from asyncmoe.errors import UserError
from asyncmoe.launch.agent_store import listen_on
from asyncmoe.rpc import address

FOUND = {"lo": ["127.0.0.1"], "eth0": ["192.168.7.4"], "ib0": ["10.1.2.3", "10.1.9.9"], "down": []}


@pytest.mark.parametrize(
    ("network", "expected"), [("ib0", "10.1.2.3"), ("10.1.9.0/24", "10.1.9.9"), ("192.168.0.0/16", "192.168.7.4"), ("lo", "127.0.0.1")]
)
def test_an_interface_or_a_network(network: str, expected: str) -> None:
    assert address.choose(network, FOUND) == expected


@pytest.mark.parametrize("network", ["eth1", "10.2.0.0/16", "down", "10.1.0.0/99", ""])
def test_what_is_not_there_is_named_with_what_is(network: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.network: .* lo 127\.0\.0\.1, eth0 192\.168\.7\.4, ib0 10\.1\.2\.3 10\.1\.9\.9"):
        address.choose(network, FOUND)


def test_this_machine() -> None:
    assert address.reachable("loopback") == "127.0.0.1"
    assert address.reachable("lo") == "127.0.0.1"
    assert address.reachable("hostname") == socket.gethostbyname(socket.gethostname())
    assert address.towards("127.0.0.1", 9) == "127.0.0.1"
    assert address.host_id() == address.host_id() != ""


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCMOE_HOST", "127.0.0.9")
    assert address.reachable("no such network") == "127.0.0.9"
    monkeypatch.setenv("ASYNCMOE_HOST", "no-such-host.invalid")
    with pytest.raises(UserError, match=r"ASYNCMOE_HOST: got 'no-such-host\.invalid'"):
        address.reachable("loopback")


def test_a_name_that_is_loopback_only_here_is_every_address_for_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", {"node3": "127.0.1.1", "node4": "10.0.0.4", "127.0.0.1": "127.0.0.1"}.__getitem__)
    assert listen_on("node3", 2) == "0.0.0.0"
    assert listen_on("node3", 1) == "127.0.1.1"
    assert listen_on("node4", 2) == "10.0.0.4"
    assert listen_on("127.0.0.1", 2) == "127.0.0.1"
