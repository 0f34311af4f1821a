"""Which processes of other machines fit into a run."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest

from asyncmoe.errors import UserError
from asyncmoe.rpc.peers import Facts, check, facts

VERSIONS = {"asyncmoe": "0.1.0", "torch": "2.13.0"}
OURS = Facts("node1", "controller", VERSIONS, 1_000.0)


def refuse(ours: Facts, theirs: Facts, max_clock_skew_s: float) -> str:
    """Why the other is refused, or nothing."""
    try:
        check(ours, theirs, max_clock_skew_s)
    except UserError as error:
        return str(error)
    return ""


def other(versions: dict[str, str] | None = None, seconds: float = 0.0) -> Facts:
    return Facts("node7", "trainer.3", VERSIONS if versions is None else versions, OURS.time + seconds)


@pytest.mark.parametrize("seconds", [0.0, 9.9, -9.9, 10.0, -10.0])
def test_equal_versions_and_clocks_not_too_far_apart_are_fine(seconds: float) -> None:
    assert refuse(OURS, other(seconds=seconds), 10.0) == ""


def test_every_version_that_differs_is_named_on_both_nodes_with_the_hint() -> None:
    assert refuse(OURS, other({"asyncmoe": "0.2.0", "torch": "2.12.1"}), 10.0) == (
        "trainer.3 on node7: got asyncmoe 0.2.0, torch 2.12.1, expected asyncmoe 0.1.0, torch 2.13.0 as controller on node1 has; "
        "install the same versions on both nodes"
    )


def test_settings_of_nccl_that_differ_are_named_on_both_nodes() -> None:
    ours, theirs = ({"NCCL_CUMEM_ENABLE": "0", "NCCL_NET": "IB"}, {"NCCL_CUMEM_ENABLE": "1", "NCCL_NET": "IB", "NCCL_P2P_DISABLE": "1"})
    line = refuse(msgspec.structs.replace(OURS, nccl=ours), msgspec.structs.replace(other(), nccl=theirs), 10.0)
    assert line == (
        "trainer.3 on node7: got NCCL_CUMEM_ENABLE 1, NCCL_P2P_DISABLE 1, expected NCCL_CUMEM_ENABLE 0, NCCL_P2P_DISABLE unset as "
        "controller on node1 has; NCCL carries weights between both: export the same before both start; its files count too"
    )


@pytest.mark.parametrize(("seconds", "words"), [(12.34, "12.3 s ahead of"), (-3600.0, "3600.0 s behind")])
def test_a_clock_apart_is_named_with_the_limit_and_the_hint(seconds: float, words: str) -> None:
    line = refuse(OURS, other(seconds=seconds), 10.0)
    assert line.startswith(
        f"trainer.3 on node7: got a clock {words} that of controller on node1, expected at most 10 s (cluster.max_clock_skew_s); "
    )
    assert "chronyc" in line


def test_our_own_facts_cross_the_wire_and_fit_ourselves() -> None:
    made = facts("trainer.0")
    assert (made.host, made.role) == (socket.gethostname(), "trainer.0")
    assert {"torch", "msgspec"} <= made.versions.keys()
    assert abs(made.time - time.time()) < 60
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Facts) == made
    assert refuse(made, facts("trainer.1"), 60.0) == ""
    assert facts("x", ["no-such-package"]).versions == {}
