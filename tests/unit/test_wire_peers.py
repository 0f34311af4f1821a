"""Compatibility of other machines' processes with a run."""

from __future__ import annotations

import socket

import msgspec
import pytest

from asyncmoe.errors import UserError
from asyncmoe.rpc.peers import Facts, check, facts

VERSIONS = {"asyncmoe": "0.1.0", "torch": "2.13.0"}
OURS = Facts("node1", "controller", VERSIONS, 1_000.0)


def refuse(ours: Facts, theirs: Facts) -> str:
    """The reason for refusing the other process, or nothing."""
    try:
        check(ours, theirs)
    except UserError as error:
        return str(error)
    return ""


def other(versions: dict[str, str] | None = None, seconds: float = 0.0) -> Facts:
    return Facts("node7", "trainer.3", VERSIONS if versions is None else versions, OURS.time + seconds)


@pytest.mark.parametrize(
    ("seconds", "got"), [(10.0, ""), (-10.0, ""), (10.1, "got a clock 10.1 s ahead of that of controller"), (-3600.0, "3600.0 s behind")]
)
def test_a_clock_may_be_ten_seconds_apart(seconds: float, got: str) -> None:
    said = refuse(OURS, other(seconds=seconds))
    assert (said != "") == (got != "")
    assert got in said


def test_every_version_and_setting_of_nccl_that_differs_is_named_on_both_nodes() -> None:
    assert refuse(OURS, other({"asyncmoe": "0.2.0", "torch": "2.12.1"})).startswith(
        "trainer.3 on node7: got asyncmoe 0.2.0, torch 2.12.1, expected asyncmoe 0.1.0, torch 2.13.0 as controller on node1 has; "
    )
    assert refuse(OURS, other({"asyncmoe": "0.1.0", "torch": "2.13.0+cu130", "sglang": "1"})) == "", "builds, and what one of them lacks"
    ours, theirs = ({"NCCL_CUMEM_ENABLE": "0", "NCCL_NET": "IB"}, {"NCCL_CUMEM_ENABLE": "1", "NCCL_NET": "IB", "NCCL_P2P_DISABLE": "1"})
    assert refuse(msgspec.structs.replace(OURS, nccl=ours), msgspec.structs.replace(other(), nccl=theirs)).startswith(
        "trainer.3 on node7: got NCCL_CUMEM_ENABLE 1, NCCL_P2P_DISABLE 1, expected NCCL_CUMEM_ENABLE 0, NCCL_P2P_DISABLE unset as "
    )


def test_our_own_facts_cross_the_wire_and_fit_ourselves() -> None:
    made = facts("trainer.0")
    assert (made.host, made.role) == (socket.gethostname(), "trainer.0")
    assert {"torch", "msgspec"} <= made.versions.keys()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Facts) == made
    assert refuse(made, facts("trainer.1")) == ""
