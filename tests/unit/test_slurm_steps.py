"""The nodes of a job, the placement of a run's processes, and the srun command of each."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.launch.commands import EngineMachine
from asyncmoe.launch.slurm import control, join, parts, steps, supervise
from asyncmoe.launch.slurm.steps import Allocation, read_allocation
from asyncmoe.rpc.environment import STARTS, TRAINER_EPOCH
from tests.configs import demo

BATCH = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-3]"}
OUTSIDE = ("python",)


def expand(nodelist: str) -> tuple[str, ...]:
    """As `scontrol show hostnames` does, for one range."""
    match = re.fullmatch(r"(\w+)\[(\d+)-(\d+)]", nodelist)
    return (nodelist,) if match is None else tuple(f"{match[1]}{number}" for number in range(int(match[2]), int(match[3]) + 1))


def config(*overrides: str) -> Config:
    return demo("run.dir=/runs/mine", *overrides)


def job(nodes: int) -> Allocation:
    return Allocation(12, "12", 0, tuple(f"n{number}" for number in range(1, nodes + 1)))


def test_the_variables_of_a_batch_script() -> None:
    found = read_allocation(BATCH, expand)
    assert found == Allocation(12, "12", 0, ("n1", "n2", "n3"))
    assert read_allocation({**BATCH, "SLURM_RESTART_COUNT": "2"}, expand).restarts == 2


def test_engines_come_first_and_the_controller_is_beside_them() -> None:
    placed = steps.place(job(5), config("engines.count=4", "cluster.engine_nodes=2", "cluster.trainer_nodes=2"))
    assert placed.engines == (("n1", EngineMachine((0, 1))), ("n2", EngineMachine((2, 3))))
    assert placed.controller == "n1"
    assert (placed.trainers, placed.unused) == (("n3", "n4"), ("n5",))


@pytest.mark.parametrize(
    ("nodes", "overrides", "words"),
    [
        (2, ("cluster.trainer_nodes=2",), "nodes of job 12: got 2 .n1, n2., expected at least 3 .*sbatch --nodes=3"),
        (1, ("cluster.trainer_nodes=2",), "got 1 .n1., expected at least 3"),
        (9, ("cluster.trainer_nodes=3",), "cluster.trainer_nodes: got 3, expected a divisor of trainer.ranks = 2"),
        (9, ("cluster.engine_nodes=3", "engines.nodes=2", "engines.tp=2", "engines.count=2"), "expected a multiple of engines.nodes = 2"),
    ],
)
def test_what_does_not_fit_is_named(nodes: int, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        steps.place(job(nodes), config(*overrides))


@pytest.mark.parametrize(
    ("nodes", "overrides", "more"),
    [
        (3, (), ("cluster.network=hostname",)),
        (3, ("cluster.network=ib0",), ()),
        (1, (), ()),
        (1, ("cluster.network=ib0",), ("engines.first_gpu=2",)),
        (1, ("cluster.network=ib0", "engines.first_gpu=4"), ()),
    ],
)
def test_what_an_allocation_implies(nodes: int, overrides: tuple[str, ...], more: tuple[str, ...]) -> None:
    assert steps.implied(job(nodes), config(*overrides)) == ("engines.join=true", *more)
    with pytest.raises(ConfigError, match="placement: got colocated"):
        steps.implied(job(nodes), config("placement=colocated", "queue.staleness.max_staleness=0"))


def test_a_node_has_a_gpu_for_every_process() -> None:
    def check(nodes: int, gpus: int, *overrides: str) -> None:
        options = config(*overrides, *steps.implied(job(nodes), config(*overrides)))
        steps.check_gpus(steps.place(job(nodes), options), options, gpus)

    check(1, 3)
    check(2, 2)
    with pytest.raises(ConfigError, match=r"GPUs of this machine: got 2, expected at least 3: from GPU 2 on"):
        check(1, 2)
    with pytest.raises(ConfigError, match=r"trainer.ranks: got 2 on a machine with 1 GPU, expected at most 1"):
        check(2, 1)
    with pytest.raises(ConfigError, match=r"engines.first_gpu: got 1, which puts an engine and the trainer on GPU 1, expected at least 2"):
        check(1, 8, "engines.first_gpu=1")


@given(st.integers(1, 10**8), st.integers(0, 3))
def test_a_job_that_starts_again_meets_at_another_port(number: int, restarts: int) -> None:
    port, next_port = steps.master_port(number, restarts), steps.master_port(number, restarts + 1)
    assert 1024 < port < 32768
    assert port != next_port
    assert port != steps.master_port(number + 1, restarts)
    assert len({steps.master_port(number, restarts, epoch) for epoch in range(4)} | {next_port}) == 5


def test_every_process_is_a_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `test_launch_ray` tells of every launcher's processes, as commands of srun."""
    monkeypatch.setattr(parts.Child, "__init__", lambda part, *given: setattr(part, "given", given))
    monkeypatch.setattr(parts.SlurmPart, "returncode", 0)
    where, options, found = job(3), config("engines.count=2", "cluster.trainer_nodes=2"), list[Any]()
    table = supervise._table(where, steps.place(where, options), options, Path("/runs/mine/config.yaml"), "10.0.0.2", found)
    for one in table.values():
        one.start(2)
    named = [("controller", "n1"), ("engine.0", "n1"), ("engine.1", "n1"), ("trainer.0", "n2"), ("trainer.1", "n3")]
    for one, (step, node) in zip(found, named, strict=True):
        name, command, log, environment = one.given
        assert (one.step, name) == (step, f"{step} on {node}")
        assert command[:3] == ("srun", f"--job-name={step}", "--overlap")
        assert {"--mpi=none", "--nodes=1", "--ntasks=1", f"--nodelist={node}"} <= set(command)
        assert f"{sys.executable} -m asyncmoe.launch.slurm.task -m asyncmoe" in " ".join(command)
        assert log == Path(f"/runs/mine/logs/{step}.{node}.log")
        assert (environment.get(TRAINER_EPOCH) or environment.get(STARTS)) == "2"
    assert f"--nproc-per-node 1 --master-addr 10.0.0.2 --master-port {steps.master_port(12, 0, 2)} " in " ".join(command)
    asked = list[Any]()
    monkeypatch.setattr(parts, "end_all", lambda job, ended: asked.append([one.step for one in ended]))
    for part in table.values():
        part.end()
    assert asked == [["controller"], ["engine.0"], ["engine.1"], ["trainer.0", "trainer.1"]]


def test_containers_come_from_the_environment() -> None:
    assert steps.program({}, "/venv/bin/python") == ("/venv/bin/python",)
    given = {"ASYNCMOE_CONTAINER_IMAGE": "/images/a.sqsh", "ASYNCMOE_CONTAINER_MOUNTS": "/shared:/shared"}
    made = steps.program(given, "/venv/bin/python")
    command = steps.srun(["n1"], 1, made, "x", ["-m", "asyncmoe"])
    assert command[-5:] == ("--container-image=/images/a.sqsh", "--container-mounts=/shared:/shared", "python3", "-m", "asyncmoe")
    assert steps.program({**given, "ASYNCMOE_CONTAINER_PYTHON": "/opt/python"}, "p")[-1] == "/opt/python"


def test_engines_that_join_are_tasks_of_one_step() -> None:
    options = config("engines.count=5", "cluster.engine_nodes=2", "engines.join=true")
    assert join.engines_each(options) == 3
    command = join.step(job(2), options, Path("c"), 3, OUTSIDE)
    assert {"--nodelist=n1,n2", "--ntasks=6", "--ntasks-per-node=3", "--kill-on-bad-exit=0", "--label"} <= set(command)
    assert command[-6:] == ("python", "-m", "asyncmoe.launch.slurm.join", "--task", "c", "1")
    with pytest.raises(ConfigError, match=r"c: engines\.join: got false"):
        join.step(job(2), config(), Path("c"), 1, OUTSIDE)
    with pytest.raises(UserError, match=r"arguments: got runs/a many, expected a run directory, and optionally engines per node"):
        join.run(["runs/a", "many"])


def test_slurm_says_why_a_step_has_no_word_of_its_own(tmp_path: Path) -> None:
    def ended(text: str, status: int) -> parts.SlurmPart:
        command = ("sh", "-c", 'printf "%s" "$1"; exit $2', "sh", text, str(status))
        made = parts.SlurmPart("trainer.1", "n3", command, tmp_path, {})
        assert made.wait(20)
        return made

    killed = ended("srun: error: n3: task 0: Killed\n", 137)
    assert (killed.returncode, killed.reason) == (-9, None)
    assert killed.why().startswith("trainer.1 on n3: was ended by SIGKILL, as when memory runs out; look at `sacct -j`")
    refused = "srun: error: Unable to create step for job 3: Requested node configuration is not available"
    assert ended(f"{refused}\nsrun: error: n3: task 0: Exited with exit code 1\n", 1).why() == f"trainer.1 on n3: {refused}"
    assert ended("slurmstepd: error: *** STEP 3.0 ON n2 CANCELLED AT 2026-11-22T03:41:00 ***\n", 1).reason is None
    own = ended("error: trainer.3 on n3: x: got y\nsrun: error: n3: task 0: Exited with exit code 2\n", 2)
    assert (own.returncode, own.why()) == (2, "trainer.3 on n3: x: got y")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784.0), ("2:03:04", 7384.0), ("0:07", 7.0), ("UNLIMITED", None), ("", None)],
)
def test_the_time_that_is_left(text: str, seconds: float | None) -> None:
    assert control.parse_left(f"{text}\n") == seconds
