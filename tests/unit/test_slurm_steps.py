"""Which nodes a job has, which part of a run lives where, and the srun command of each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.launch.engine_machines import EngineMachine
from asyncmoe.launch.slurm import allocation, control, join, steps, sweep
from asyncmoe.launch.slurm.allocation import Allocation, JobComponent

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"
BATCH = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-3]"}
HETEROGENEOUS = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "a1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "5",
    "SLURM_JOB_ID_HET_GROUP_1": "6",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "a1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
}
OUTSIDE = steps.Container(None, None, "python")


def expand(nodelist: str) -> tuple[str, ...]:
    """As `scontrol show hostnames` does, for one range."""
    match = re.fullmatch(r"(\w+)\[(\d+)-(\d+)]", nodelist)
    return (nodelist,) if match is None else tuple(f"{match[1]}{number}" for number in range(int(match[2]), int(match[3]) + 1))


def config(*overrides: str) -> Config:
    return configuration.load(DEMO, ["run.dir=/runs/mine", *overrides])


def job(nodes: int) -> Allocation:
    return Allocation(12, "12", 0, (JobComponent("12", tuple(f"n{number}" for number in range(1, nodes + 1))),))


def test_the_variables_of_a_batch_script() -> None:
    found = allocation.read(BATCH, expand)
    assert found == Allocation(12, "12", 0, (JobComponent("12", ("n1", "n2", "n3")),))
    assert allocation.read({**BATCH, "SLURM_RESTART_COUNT": "2"}, expand).restarts == 2


def test_the_last_task_of_an_array_is_not_taken_for_the_whole_array() -> None:
    found = allocation.read({**BATCH, "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, expand)
    assert (found.job, found.name, found.groups[0].job) == (12, "12_3", "12_3")


def test_a_heterogeneous_job_has_a_group_of_nodes_for_each_component() -> None:
    found = allocation.read(HETEROGENEOUS, expand)
    assert found.groups == (JobComponent("5", ("a1",), 0), JobComponent("6", ("n2", "n3"), 1))
    assert found.name == "5"
    assert found.nodes == ("a1", "n2", "n3")


def test_outside_of_slurm_the_command_that_works_is_named() -> None:
    with pytest.raises(UserError, match=r"SLURM_JOB_ID: got no such variable.*sbatch.*asyncmoe run"):
        allocation.read({}, expand)


def test_engines_come_first_and_the_controller_is_beside_them() -> None:
    placed = steps.place(job(5), config("engines.count=4", "cluster.engine_nodes=2", "cluster.trainer_nodes=2"))
    assert placed.engines == (("n1", EngineMachine((0, 1))), ("n2", EngineMachine((2, 3))))
    assert placed.controller == "n1"
    assert (placed.trainers, placed.ranks, placed.unused) == (("n3", "n4"), 1, ("n5",))


def test_of_a_heterogeneous_job_the_second_component_trains() -> None:
    placed = steps.place(allocation.read(HETEROGENEOUS, expand), config("cluster.trainer_nodes=2"))
    assert (placed.controller, placed.trainers) == ("a1", ("n2", "n3"))


def test_one_node_is_shared() -> None:
    placed = steps.place(job(1), config())
    assert (placed.controller, placed.trainers, placed.ranks) == ("n1", ("n1",), 2)


@pytest.mark.parametrize(
    ("nodes", "overrides", "words"),
    [
        (2, ("cluster.trainer_nodes=2",), "nodes of job 12: got 2 .n1, n2., expected at least 3 .*sbatch --nodes=3"),
        (1, ("cluster.trainer_nodes=2",), "got 1 .n1., expected at least 3"),
        (9, ("cluster.trainer_nodes=3",), "cluster.trainer_nodes: got 3, expected a divisor of trainer.ranks = 2"),
        (9, ("cluster.engine_nodes=2",), "cluster.engine_nodes: got 2, expected at most engines.count = 1"),
    ],
)
def test_what_does_not_fit_is_named(nodes: int, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        steps.place(job(nodes), config(*overrides))


def test_a_component_with_too_few_nodes_is_named() -> None:
    with pytest.raises(UserError, match=r"nodes of component 1 of job 5: got 2 .*expected at least cluster.trainer_nodes 4"):
        steps.place(allocation.read(HETEROGENEOUS, expand), config("trainer.ranks=4", "cluster.trainer_nodes=4"))
    three = Allocation(5, "5", 0, tuple(JobComponent(str(5 + index), (f"n{index}",), index) for index in range(3)))
    with pytest.raises(UserError, match="components of heterogeneous job 5: got 3, expected 2"):
        steps.place(three, config())


def test_several_nodes_are_reached_by_their_names_unless_told_otherwise() -> None:
    assert steps.implied(job(3), config()) == ("engines.join=true", "cluster.network=hostname")
    assert steps.implied(job(3), config("cluster.network=ib0")) == ("engines.join=true",)
    assert steps.implied(job(1), config()) == ("engines.join=true",)


def test_on_one_node_engines_are_behind_the_trainer_also_where_others_may_join() -> None:
    assert steps.implied(job(1), config("cluster.network=ib0")) == ("engines.join=true", "engines.first_gpu=2")
    assert steps.implied(job(1), config("cluster.network=ib0", "engines.first_gpu=4")) == ("engines.join=true",)


def test_a_node_has_a_gpu_for_every_process() -> None:
    def check(nodes: int, gpus: int, *overrides: str) -> None:
        options = config(*overrides, *steps.implied(job(nodes), config(*overrides)))
        steps.check_gpus(steps.place(job(nodes), options), options, gpus)

    check(1, 3)
    check(2, 2)
    with pytest.raises(ConfigError, match=r"GPUs of this machine: got 2, expected 3: 1 x engines.tp 1 from GPU 2 on and 2 of the trainer"):
        check(1, 2)
    with pytest.raises(ConfigError, match=r"trainer.ranks: got 2 on a machine with 1 GPU, expected at most 1"):
        check(2, 1)
    with pytest.raises(ConfigError, match=r"engines.first_gpu: got 1: an engine and the trainer on GPU 1, expected at least 2"):
        check(1, 8, "engines.first_gpu=1")


def test_a_job_that_starts_again_resumes_its_own_run() -> None:
    assert steps.implied(replace(job(1), restarts=1), config()) == ("engines.join=true", "run.resume=true")


@given(st.integers(1, 10**8), st.integers(0, 3))
def test_a_job_that_starts_again_meets_at_another_port(number: int, restarts: int) -> None:
    port, next_port = steps.master_port(number, restarts), steps.master_port(number, restarts + 1)
    assert 1024 < port < 32768
    assert port != next_port
    assert port != steps.master_port(number + 1, restarts)
    assert len({steps.master_port(number, restarts, epoch) for epoch in range(4)} | {next_port}) == 5


def test_every_part_is_a_step_of_its_own() -> None:
    options = config("engines.count=2", "cluster.trainer_nodes=2")
    where = job(3)
    placed, file = steps.place(where, options), Path("/runs/mine/config.yaml")
    again = steps.trainer(where, placed, options, file, ("10.0.0.2", 23456), OUTSIDE, epoch=2)
    started = (one(0) for one in steps.engines(where, placed, options, file, OUTSIDE).values())
    planned = [steps.controller(where, placed, options, file, OUTSIDE), *started, again]
    assert [step.name for step in planned] == ["controller", "engine.0", "engine.1", "trainer"]
    controller, first, second, trainer = planned
    for step in planned:
        assert step.command[:3] == ("srun", f"--job-name={step.name}", "--overlap")
        assert {"--kill-on-bad-exit=1", "--mpi=none", f"--nodes={len(step.nodes)}", f"--ntasks={len(step.nodes)}"} <= set(step.command)
        assert not any(flag.startswith(("--het-group", "--container")) for flag in step.command)
    start = ("python", "-m", "asyncmoe.launch.slurm.task", "/runs/mine/logs")
    assert controller.command[-8:] == (*start, "controller", "rollout", "/runs/mine/config.yaml", "0")
    assert second.command[-11:] == (*start, "engine.1", "engine", "/runs/mine/config.yaml", "engine.1", "1", "0", "0")
    assert first.nodes == second.nodes == ("n1",)
    assert steps.engines(where, placed, options, file, OUTSIDE)["engine.1"](2).command[-1] == "2", "starts before"
    assert trainer.nodes == ("n2", "n3")
    assert "--nodelist=n2,n3" in trainer.command
    assert trainer.command[-12:] == (*start, "trainer", "trainer", "/runs/mine/config.yaml", "n2,n3", "1", "10.0.0.2", "23456", "2")
    assert trainer.logs == {"n2": Path("/runs/mine/logs/trainer.n2.log"), "n3": Path("/runs/mine/logs/trainer.n3.log")}


def test_steps_of_the_second_component_say_so() -> None:
    options = config("cluster.trainer_nodes=2")
    where = allocation.read(HETEROGENEOUS, expand)
    placed, file = steps.place(where, options), Path("c")
    trainer = steps.trainer(where, placed, options, file, ("10.0.0.2", 23456), OUTSIDE)
    started = (one(0) for one in steps.engines(where, placed, options, file, OUTSIDE).values())
    planned = [steps.controller(where, placed, options, file, OUTSIDE), *started, trainer]
    assert [(step.name, step.job) for step in planned] == [("controller", "5"), ("engine.0", "5"), ("trainer", "6")]
    assert ["--het-group=0" in step.command for step in planned] == [True, True, False]
    assert "--het-group=1" in planned[-1].command


def test_containers_come_from_the_environment() -> None:
    assert steps.container({}, "/venv/bin/python") == steps.Container(None, None, "/venv/bin/python")
    given = {"ASYNCMOE_CONTAINER_IMAGE": "/images/a.sqsh", "ASYNCMOE_CONTAINER_MOUNTS": "/shared:/shared"}
    made = steps.container(given, "/venv/bin/python")
    assert made.python == "python3"
    command = steps.srun(job(1), "x", ["n1"], Path("logs"), made, ["rollout"]).command
    assert {"--container-image=/images/a.sqsh", "--container-mounts=/shared:/shared"} <= set(command)
    assert command[command.index("-m") - 1] == "python3"
    assert steps.container({**given, "ASYNCMOE_CONTAINER_PYTHON": "/opt/python"}, "p").python == "/opt/python"


def test_engines_that_join_have_names_no_other_job_gives() -> None:
    planned = join.plan(job(2), config("engines.count=4", "cluster.engine_nodes=2"), Path("c"), 2, OUTSIDE)
    assert [step.name for step in planned] == [f"engine.job12.{node}.{index}" for node in ("n1", "n2") for index in (0, 1)]
    assert join.number("8") == 8
    with pytest.raises(UserError, match=r"ENGINES_PER_NODE: got 'many', expected a number of at least 1"):
        join.number("many")
    assert join.engines_each(config("engines.count=5", "cluster.engine_nodes=2")) == 3


SWEEP = "# learning rates\ntrainer.optimizer.lr=1e-6\n\n  # and staleness\ntrainer.optimizer.lr=3e-6 'engines.args=[\"--a b\"]'\n"


def test_an_array_task_takes_its_line_of_overrides() -> None:
    assert sweep.line(SWEEP, 1, "f") == ["trainer.optimizer.lr=1e-6"]
    assert sweep.line(SWEEP, 2, "f") == ["trainer.optimizer.lr=3e-6", 'engines.args=["--a b"]']
    with pytest.raises(DataError, match=r"f: got array task 3, expected 1 to 2"):
        sweep.line(SWEEP, 3, "f")
    with pytest.raises(DataError, match=r"f, run 1: got .*No closing quotation"):
        sweep.line("run.dir='x", 1, "f")


def test_every_run_of_a_sweep_has_a_directory_of_its_own() -> None:
    assert sweep.directory(Path("runs/a"), ["x=1"], 2) == ["x=1", "run.dir=runs/a/run-2"]
    assert sweep.directory(Path("runs/b"), ["run.dir=runs/b"], 2) == ["run.dir=runs/b"]
    assert sweep.task({"SLURM_ARRAY_TASK_ID": "7"}) == 7
    with pytest.raises(UserError, match=r"SLURM_ARRAY_TASK_ID.*sbatch --array"):
        sweep.task({})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784.0), ("2:03:04", 7384.0), ("04:59", 299.0), ("0:07", 7.0), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_the_time_that_is_left(text: str, seconds: float | None) -> None:
    assert control.parse_left(f"{text}\n") == seconds


def test_a_node_is_reached_at_the_address_that_slurm_has() -> None:
    assert control.address_in("NodeName=n2 Arch=x86_64 NodeAddr=10.1.0.2 NodeHostName=n2 Version=22.05.8") == "10.1.0.2"
    assert control.address_in("NodeName=n2 NodeAddr=(null)") is None
