"""What hosts send, put together; the run itself is in tests/system/test_rollout_hosts.py."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import InvariantBroken
from benchmarks.network.flows import connection_of
from benchmarks.network.whole_run import HOSTS, Payloads, check, summary, table

ADDRESSES = {f"10.0.0.{n}": name for n, name in enumerate(HOSTS)}
CONTROLLER, W1, W2, T0, T1 = ADDRESSES
RPC, HTTP, GLOO = 7000, 8000, 9000
PAYLOAD = Payloads(groups=2, trajectories=8, nbytes=100_000)


def sent(**changed: int) -> list[dict[str, Any]]:
    """Both workers serve the controller and rank 0 at RPC; engines serve the controller at HTTP, and take weights at GLOO."""
    counts = {"one": 60_000, "two": 45_000, "other": 100, "ledger": 700, **changed}
    hosts: dict[str, list[list[Any]]] = {address: [] for address in ADDRESSES}
    for worker, key in ((W1, "one"), (W2, "two")):
        hosts[worker] += [[worker, RPC, T0, 40, counts[key]], [worker, RPC, CONTROLLER, 41, counts["ledger"]]]
        hosts[worker] += [[worker, RPC, T1, 45, counts["other"]], [worker, HTTP, CONTROLLER, 42, 5000], [worker, GLOO, T0, 43, 900]]
        hosts[T0] += [[T0, 40, worker, RPC, 300], [T0, 43, worker, GLOO, 1_000_000]]
        hosts[CONTROLLER] += [[CONTROLLER, 41, worker, RPC, 100], [CONTROLLER, 42, worker, HTTP, 50]]
    hosts[T0] += [[T0, 44, CONTROLLER, 6000, 800]]
    hosts[CONTROLLER] += [[CONTROLLER, 6000, T0, 44, 2400]]
    return [{"interface": sum(one[4] for one in each) + 42, "other": 42, "connections": each} for each in hosts.values()]


def test_bytes_are_told_apart_by_who_serves_whom() -> None:
    found = summary(sent(), ADDRESSES, PAYLOAD)
    check(found)
    assert found["fetched"] == {"trainer_0": 105_000, "trainer_1": 200}
    assert found["copies"] == 1.052
    assert (found["ledger_bytes"], found["ledger_bytes_a_trajectory"]) == (1600, 200)
    assert (found["lease_bytes"], found["lease_bytes_a_trajectory"]) == (3200, 400)
    assert found["controller_bytes_a_trajectory"] == (1600 + 3200 + 2 * 5050) / 8
    assert found["links"]["trainer_0_to_worker_1"] == 1_000_300
    assert found["counted"] == [1.0] * 5
    assert "8 trajectories of 12,500 bytes" in table(found)


@pytest.mark.parametrize(("changed", "why"), [({"one": 160_000}, "one copy"), ({"one": 3000}, "one copy"), ({"other": 9000}, "one rank")])
def test_another_way_than_once_to_one_rank_is_an_error(changed: dict[str, int], why: str) -> None:
    with pytest.raises(InvariantBroken, match=why):
        check(summary(sent(**changed), ADDRESSES, PAYLOAD))


def test_packets_that_were_not_seen_are_an_error() -> None:
    seen = sent()
    seen[2]["interface"] *= 2
    with pytest.raises(InvariantBroken, match="what the interfaces sent"):
        check(summary(seen, ADDRESSES, PAYLOAD))


@given(st.ip_addresses(v=4), st.ip_addresses(v=4), st.integers(0, 65535), st.integers(0, 65535), st.integers(5, 15), st.integers(0, 8191))
def test_a_packet_says_whose_it_is(a: Any, b: Any, sender: int, receiver: int, words: int, offset: int) -> None:
    tcp = struct.pack(">HHLL", sender, receiver, 1, 2)
    ip = struct.pack(">BBHHHBBH4s4s", 0x40 | words, 0, 1500, 7, offset, 64, socket.IPPROTO_TCP, 0, a.packed, b.packed)
    frame = bytes(12) + b"\x08\x00" + ip + bytes(4 * words - 20) + tcp
    ports = (0, 0) if offset else (sender, receiver)
    assert connection_of(frame) == (str(a), ports[0], str(b), ports[1])
    assert connection_of(bytes(12) + b"\x08\x06" + bytes(60)) is None
