"""An engine over several machines: refused configurations, placement of its nodes, and how each is started."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.config import Config, devices
from asyncmoe.engines.engine_agent import check_node
from asyncmoe.engines.nodes import ALONE, MeetingPlace, NodePlace
from asyncmoe.engines.sglang import process
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.launch.commands import engine_machines
from asyncmoe.launch.slurm import join
from tests.unit.test_slurm_steps import config, job

OUTSIDE = ("python",)
FULL = ("engines.max_total_tokens=199", "environment.max_tokens=100")
TCP, FILE = NodePlace(1, "tcp://10.0.0.1:29500"), NodePlace(1, "file:///tmp/asyncmoe-x/ranks")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("engines.tp=4", "engines.nodes=3"), "engines.nodes: got 3, expected a divisor of engines.tp = 4"),
        (("engines.nodes=2",), "engines.nodes: got 2, expected a divisor of engines.tp = 1"),
        (("engines.nodes=0",), "engines.nodes: got 0, expected greater than 0"),
        (("engines.tp=2", "engines.nodes=2", "train=lora"), "engines.nodes: got 2, expected 1 because train is lora"),
        (("engines.tp=4", "engines.dp_attention=3"), "engines.dp_attention: got 3, expected a divisor of engines.tp = 4"),
        (("engines.tp=2", "engines.dp_attention=2", "train=lora"), "engines.dp_attention: got 2, expected 1 because train is lora"),
        (("engines.tp=2", "engines.dp_attention=2", "engines.nodes=2"), "engines.dp_attention: got 2, .* because engines.nodes is 2"),
        (('engines.args=["--attn-dp-size", "2"]',), "engines.args: got --attn-dp-size, expected none of .* set engines.dp_attention"),
        (('engines.args=["--nnodes", "2"]',), "engines.args: got --nnodes, expected none of .* set engines.nodes"),
        (('engines.args=["--dp-size=2"]',), "engines.args: got --dp-size, expected none of .* set engines.dp_attention"),
        (("engines.tp=2", "engines.dp_attention=2", "engines.max_running=9"), "engines.max_running: got 9, expected a multiple of"),
        (("engines.tp=2", "engines.dp_attention=2", *FULL), "engines.max_total_tokens: got 199, expected at least 200"),
        (("engines.max_total_tokens=64", "rollout.max_new_tokens=65"), "engines.max_total_tokens: got 64, expected at least 65"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(overrides: Sequence[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        config(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "name", "node", "words"),
    [
        (2, "engine.a", 2, "--node: got 2, expected 0 to 1, because engines.nodes is 2"),
        (1, "engine.a", 1, "--node: got 1, expected 0, because engines.nodes is 1"),
        (2, None, 0, "--name: got nothing, expected a name, the same on all 2 nodes of the engine"),
    ],
)
def test_a_machine_must_say_which_node_of_which_engine_it_is(nodes: int, name: str | None, node: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_node(nodes, name, node)
    check_node(2, "engine.a", 1)
    check_node(1, None, 0)


def option(command: Sequence[str], name: str) -> str:
    return command[command.index(name) + 1]


def started(made: Config, index: int, place: NodePlace) -> list[str]:
    return process.command(made, index, "10.0.0.2", 31000, False, 5, None, (), place)


def test_every_node_is_started_alike_but_for_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config("engines.tp=4", "engines.nodes=2")
    assert "--nnodes" not in started(made, 0, ALONE)
    over, here = started(made, 0, TCP), started(made, 0, FILE)
    assert [option(over, name) for name in ("--tp", "--nnodes", "--node-rank", "--random-seed")] == ["4", "2", "1", "5"]
    assert option(over, "--dist-init-addr") == "10.0.0.1:29500"
    assert "--dist-init-addr" not in here
    assert started(made, 0, NodePlace(0, FILE.meeting)) == [*here[: (at := here.index("--node-rank") + 1)], "0", *here[at + 1 :]]
    monkeypatch.setattr(process.address, "interfaces", lambda: {"lo": ["127.0.0.1"], "ib0": ["10.0.0.2"]})
    given = process.environment(made, 0, "10.0.0.2", TCP)
    assert (given["GLOO_SOCKET_IFNAME"], given["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0")
    assert given["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] == "false"
    assert "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" not in given
    assert process.environment(made, 0, "127.0.0.1", FILE)["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == FILE.meeting
    assert len(given["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2, "of this node's ranks"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert process.environment(made, 0, "10.0.0.2", TCP)["GLOO_SOCKET_IFNAME"] == "eth7"


def test_data_parallel_ranks_share_what_an_engine_may_hold() -> None:
    assert "--attn-dp-size" not in started(config("engines.tp=4"), 0, ALONE)
    given = started(config("engines.tp=4", "engines.dp_attention=2", "engines.max_running=8", "engines.max_total_tokens=8193"), 0, ALONE)
    shown = [option(given, name) for name in ("--attn-dp-size", "--max-total-tokens", "--cuda-graph-max-bs-decode")]
    assert (shown, option(given, "--max-running-requests")) == (["2", "4096", "4"], "8")  # SGLang divides the last one itself


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_nodes_of_one_machine_share_no_gpu_and_those_of_several_begin_at_the_first(each: int, nodes: int, engines: int) -> None:
    made = config(f"engines.tp={each * nodes}", f"engines.nodes={nodes}", f"engines.count={engines + 1}", "engines.first_gpu=1")

    def taken(several: bool) -> list[int]:
        firsts = [devices.engine_gpu(made, index, node, several) for index in range(engines + 1) for node in range(nodes)]
        return [gpu for first in firsts for gpu in range(first, first + each)]

    assert taken(several=False) == list(range(1, 1 + each * nodes * (engines + 1)))
    assert set(taken(several=True)) == set(range(1, 1 + each * (engines + 1)))
    (here,), (_, machine) = devices.wanted(made, False), devices.wanted(made, True)
    assert sorted(gpu for engine in here.devices.engines for gpu in engine) == taken(several=False)
    assert machine.tp == each


def test_a_place_to_meet_is_a_file_here_and_a_free_port_of_an_address() -> None:
    here, over = MeetingPlace(None), MeetingPlace("127.0.0.1")
    folder = Path(here.url.removeprefix("file://")).parent
    assert folder.stat().st_mode & 0o077 == 0
    host, port = over.url.removeprefix("tcp://").split(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    for place in (here, over):
        place.close()
        place.close()
    assert not folder.exists()
    with pytest.raises(UserError, match=r"address 192\.0\.2\.1: got Cannot assign.*; see cluster\.network"):
        MeetingPlace("192.0.2.1")


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 12))
def test_every_node_of_every_engine_has_a_machine_of_its_own(nodes: int, groups: int, count: int) -> None:
    made = config(f"engines.tp={nodes}", f"engines.nodes={nodes}", f"engines.count={count}", f"cluster.engine_nodes={groups * nodes}")
    if count < groups:
        with pytest.raises(ConfigError, match=r"cluster\.engine_nodes: got \d+, expected at most engines\.count.* = "):
            engine_machines(made)
        return
    machines = engine_machines(made)
    assert len(machines) == groups * nodes
    parts = sorted((number, machine.node) for machine in machines for number in machine.numbers)
    assert parts == [(number, node) for number in range(count) for node in range(nodes)]
    sizes = [len(machine.numbers) for machine in machines]
    assert max(sizes) - min(sizes) <= 1


SPREAD = ("engines.tp=4", "engines.nodes=2", "engines.count=4", "cluster.engine_nodes=4", "trainer.ranks=2", "cluster.network=ib0")


@pytest.mark.parametrize(("place", "name", "node"), [(0, "group0", 0), (1, "group0", 1), (2, "group1", 0), (3, "group1", 1)])
def test_slurm_joins_with_engines_over_neighbouring_nodes(place: int, name: str, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = config(*SPREAD, "engines.join=true"), list[object]()
    assert join.step(job(4), made, Path("c"), 1, OUTSIDE)[-2:] == ("c", "2")
    assert join.engines_each(made) == 2
    with pytest.raises(UserError, match=r"nodes of job 12: got 3, expected a multiple of engines\.nodes = 2; sbatch --nodes=2"):
        join.step(job(3), made, Path("c"), 1, OUTSIDE)
    for variable, value in {"SLURM_JOB_ID": "12", "SLURM_NODEID": str(place), "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(join.part, "engine", lambda file, **keys: given.append(keys))
    join._task("c", "2")
    assert given == [{"name": f"engine.job12.{name}.1", "index": 1, "node": node}]
