"""Hosts as network namespaces, and weights that travel between them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from asyncmoe.errors import InvariantBroken, TransferError
from benchmarks.network import run
from benchmarks.network.cases import Case, sized
from benchmarks.network.hosts import Host, Wire, missing, network
from benchmarks.network.rank import DIRECT

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.skipif(bool(why := missing()), reason=why)]
WIRE = Wire(rate=100_000_000)
SMALL = {**sized(55, 2), "hidden_size": 256, "vocab_size": 1024, "num_experts": 4, "num_experts_per_tok": 2}


def said(host: Host, *command: str) -> str:
    return (host.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE).communicate(timeout=60)[0] or b"").decode().strip()


def space(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def networks() -> set[str]:
    """Network namespaces that any process of the machine is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:  # it has ended
            continue
    return found


def test_hosts_are_apart_and_leave_nothing() -> None:
    devices = os.listdir("/sys/class/net")
    with network(2, WIRE) as one, network(2, WIRE) as other:
        spaces = {space(host.keeper.pid) for host in (*one, *other)}
        assert len({*spaces, space(os.getpid())}) == 5
        assert one[0].address == other[0].address
        mounts = [said(host, "stat", "-c", "%d", "/dev/shm") for host in (*one, *other)]
        assert len({*mounts, str(os.stat("/dev/shm").st_dev)}) == 5
        assert [said(host, "hostname") for host in one] == ["host0", "host1"]
        assert said(one[0], "sh", "-c", "ip route show default; ip -6 addr show dev eth0 scope link") == ""
        assert len(said(one[1], "ps", "-e", "-o", "pid=").split()) <= 3, "a host sees its own processes only"
        assert os.listdir("/sys/class/net") == devices, "nothing of them is in the machine's own network"
        one[1].die()
        assert said(one[0], "sh", "-c", f"ping -c 1 -W 1 {one[1].address} >&2 || echo gone") in ("gone", "")
        assert said(other[0], "hostname") == "host0"
    assert not networks() & spaces


def test_weights_and_deltas_travel_as_planned() -> None:
    """In `measured` every host's counters are compared with the plan, and every destination with what it should hold; also every pair of a
    full update and a delta, and in the end each engine host's weights with what the same changes of the first version make."""
    case = Case(SMALL, trainers=2, engines=2, tp=1)
    found = run.measured(case, WIRE, (DIRECT, "per_tensor"), rounds=1, bucket_bytes=1 << 18, changed=(1.0, 10.0))
    direct, others = (found["ways"][way] for way in (DIRECT, "per_tensor"))
    assert direct["planned_bytes"] == 2 * found["bytes"]
    assert others["trainer_copies"] >= 1
    assert 1 <= direct["over_plan"] < 1.2
    assert 0 < direct["share"]["best"] < 1.5
    few, many = found["deltas"]["percents"]
    for one, percent in ((few, 1.0), (many, 10.0)):
        assert one["percent"] == percent
        assert one["changed"] == pytest.approx(percent / 100, rel=0.02)
        assert len(one["dense"]["seconds"]["all"]) == len(one["delta"]["seconds"]["all"]) == 1
        assert one["dense"]["planned_bytes"] == direct["planned_bytes"]
        assert one["delta"]["planned_bytes"] < one["dense"]["planned_bytes"] * percent / 100 * 1.8
        assert min(one[way][name] for way in ("dense", "delta") for name in ("commit_s", "bytes", "cpu_share", "bound_s")) > 0
        assert set(one["delta"]["phases"]) == {"encode", "agree", "send", "wait", "carry", "prove"}
    assert few["ratio"]["bytes"] > 3 * many["ratio"]["bytes"] > 9
    assert found["deltas"]["full"]["peak_extra_share"] > 0.95, "a second copy"
    assert found["deltas"]["full"]["trainer_extra_share"] > 0.95, "what was published last"
    table = run.table({"skipped": "", "cases": [found]})
    assert DIRECT in table
    assert "sooner" in table


def test_other_bytes_than_planned_are_an_error() -> None:
    case = Case(SMALL, trainers=1, engines=1, tp=1)
    turn = {"seconds": 1.0, "cpu_s": 0.1, "retransmitted": 0, "right": True, "phases": {}}
    planned = run.Traffic((1_000_000_000, 0), (0, 1_000_000_000))
    acknowledged, good = 40_000_000, 1_040_000_000
    ranks = [{**turn, "sent": good, "received": acknowledged}, {**turn, "sent": acknowledged, "received": good}]
    run.check(case, DIRECT, ranks, planned, WIRE)
    for rank, change in ((0, {"sent": 999_999_999}), (1, {"received": 1_200_000_000}), (1, {"right": False})):
        wrong = [{**one, **(change if i == rank else {})} for i, one in enumerate(ranks)]
        with pytest.raises(InvariantBroken, match=f"host {rank}"):
            run.check(case, DIRECT, wrong, planned, WIRE)


def test_a_rank_that_dies_ends_the_measurement() -> None:
    with pytest.raises(TransferError, match="ended with status 1"):
        run.measured(Case({**SMALL, "model_type": "unheard_of"}, 1, 1, 1), WIRE, (DIRECT,), 1)
