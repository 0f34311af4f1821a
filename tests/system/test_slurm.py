"""Batch scripts on a real SLURM of three nodes on this machine: whole runs, lost processes, engines that come and go, mistakes."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncmoe import checkpoints
from tests.system import runs
from tests.system.runs import MARK, REPOSITORY, SMALL, generated, json_lines, logs, marked, metrics, nccl_settings, provide, wait_for
from tests.system.slurm_cluster import Cluster, cluster, missing

pytestmark = [pytest.mark.system, pytest.mark.skipif(missing() is not None, reason=missing() or "")]
TRAIN = "slurm/train.sbatch"
OVER_THREE = ("cluster.trainer_nodes=2",)
START_S = 300.0
"""For a run to start: some twenty seconds on cores of its own, minutes on cores of many."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provide(tmp_path_factory.mktemp("model") / "tiny")


class Jobs:
    """Jobs of one run, and what they leave behind."""

    def __init__(self, slurm: Cluster, model: Path, tmp: Path) -> None:
        self.slurm, self.model, self.tmp, self.run = slurm, model, tmp, tmp / "run"
        self.mark = uuid.uuid4().hex

    def submit(self, nodes: int, script: str, *arguments: str) -> int:
        """A job that leaves its story in `story`."""
        options = (f"--nodes={nodes}", f"--output={self.tmp}/%j.log")
        return self.slurm.submit(*options, script, *arguments, **{MARK: self.mark, "ASYNCMOE_PYTHON": sys.executable})

    def train(self, nodes: int, *overrides: str) -> int:
        """The demo's configuration with `SMALL` sizes."""
        places = (f"run.dir={self.run}", f"model.path={self.model}")
        return self.submit(nodes, TRAIN, "examples/demo.yaml", *places, *SMALL, *overrides)

    def story(self, job: int) -> str:
        """What the batch script of a job has printed."""
        path = self.tmp / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, job: int, what: str, seconds: float, done: Callable[[], bool]) -> None:
        """Until something has come, while the job is in the queue."""
        left = ("FAILED", "COMPLETED", "CANCELLED")
        wait_for(lambda: done() or self.slurm.state(job) in left, seconds, 0.5)
        assert done(), f"{what} did not come; job {job} is {self.slurm.state(job)}\n{self.everything()}"

    def ended(self, job: int, within_s: float = START_S) -> str:
        """Its final state, when nothing of any job is left: no process, and no job in the queue."""
        state = self.slurm.ended(job, within_s)
        assert wait_for(lambda: not self.slurm.queue(), 30.0), self.slurm.queue()
        assert wait_for(lambda: not marked(self.mark), 20.0), marked(self.mark)
        assert wait_for(self.slurm.idle, 20.0)
        return state

    def everything(self) -> str:
        """All logs."""
        stories = "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.tmp.glob("*.log")))
        return f"{stories}\n{logs(self.run)}"

    def sessions(self) -> list[tuple[int, list[int]]]:
        """For each start of the trainer: the step it began at, and the steps it recorded."""
        found: list[tuple[int, list[int]]] = []
        for record in json_lines(self.run / "metrics.jsonl"):
            if "resumed_at" in record:
                found.append((record["resumed_at"], []))
            else:
                found[-1][1].append(record["step"])
        return found

    def errors(self, job: int) -> list[str]:
        """Lines by which a job says what was wrong."""
        assert "Traceback" not in self.story(job), self.everything()
        return [line.removeprefix("error: ") for line in self.story(job).splitlines() if line.startswith("error: ")]


@pytest.fixture
def jobs(slurm: Cluster, model: Path, tmp_path: Path) -> Jobs:
    return Jobs(slurm, model, tmp_path)


@pytest.mark.thorough
def test_a_job_that_loses_a_node_is_requeued_and_resumes_on_the_others(jobs: Jobs) -> None:
    steps = 40
    job = jobs.train(2, f"run.steps={steps}", "trainer.checkpoint_every=10")
    jobs.wait(job, "a checkpoint", START_S, lambda: checkpoints.newest(jobs.run) is not None)
    kept = checkpoints.newest(jobs.run)
    assert kept is not None
    jobs.slurm.lose_node("n2")
    jobs.wait(job, "another start", START_S, lambda: len(jobs.sessions()) == 2)
    jobs.slurm.start_node("n2")
    jobs.slurm.call("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert jobs.ended(job) == "COMPLETED", jobs.everything()
    assert jobs.slurm.fact(job, "Restarts") == "1"
    assert "controller on n1; engines on n1 (1); 2 trainer rank(s) on each of n3" in jobs.story(job)
    (start, before), (again, after) = jobs.sessions()
    assert start == 0
    assert int(kept.name.removeprefix("step-")) <= again <= len(before)
    assert after == list(range(again + 1, steps + 5))


def test_a_run_over_three_nodes_outlives_its_trainer_and_its_controller_in_the_same_job(jobs: Jobs) -> None:
    steps = 40
    job = jobs.train(3, *OVER_THREE, f"run.steps={steps}", "trainer.checkpoint_every=10")
    jobs.wait(job, "a step", START_S, lambda: len(metrics(jobs.run)) > 6)
    assert nccl_settings(jobs.run, jobs.mark) == {"NCCL_CUMEM_ENABLE": "0"}
    before = {step: number for step, number in jobs.slurm.steps(job).items() if not step.startswith("trainer")}
    jobs.slurm.call("scancel", "--signal=KILL", jobs.slurm.steps(job)["trainer.0"])
    jobs.wait(job, "another start", START_S, lambda: len(jobs.sessions()) == 2)
    assert {step: number for step, number in jobs.slurm.steps(job).items() if not step.startswith("trainer")} == before
    jobs.wait(job, "a step", START_S, runs.further(jobs.run, 1))
    before = {step: number for step, number in jobs.slurm.steps(job).items() if step.startswith("engine")}
    jobs.slurm.call("scancel", "--signal=KILL", jobs.slurm.steps(job)["controller"])
    jobs.wait(job, "a third start", START_S, lambda: len(jobs.sessions()) == 3)
    jobs.wait(job, "a step with the next controller", START_S, runs.further(jobs.run, 3))
    assert {step: number for step, number in jobs.slurm.steps(job).items() if step.startswith("engine")} == before
    assert jobs.ended(job) == "COMPLETED", jobs.everything()
    assert jobs.slurm.fact(job, "Restarts") == "0"
    assert "the trainer starts again, restart 1 of 2 without a new step: trainer.0 on n2" in jobs.story(job)
    assert "the controller starts again, restart 1 of 2 without a new step: controller on n" in jobs.story(job)
    *_, (again, after) = jobs.sessions()
    assert after == list(range(again + 1, steps + 5))
    assert runs.summary_of(jobs.run)["trainer_restarts"] == 2
    assert (jobs.run / "report.html").exists()
    assert generated(jobs.run) == {"engine.0"}
    found = {path.name for path in (jobs.run / "logs").glob("*.n?.log")}
    assert found == {"controller.n1.log", "engine.0.n1.log", "trainer.0.n2.log", "trainer.1.n3.log"}
    assert "controller on n1; engines on n1 (1); 1 trainer rank(s) on each of n2, n3" in jobs.story(job)


@pytest.mark.thorough
def test_engines_of_another_job_join_and_leave_and_time_limit_and_preemption_requeue(jobs: Jobs) -> None:
    job = jobs.train(2, "run.steps=4000")
    jobs.wait(job, "a step", START_S, lambda: len(metrics(jobs.run)) > 4)
    more = jobs.submit(1, "slurm/rollout.sbatch", str(jobs.run))
    name = f"engine.job{more}.n3.0"
    jobs.wait(more, "the other engine", START_S, lambda: name in generated(jobs.run))
    jobs.slurm.call("scancel", "--signal=URG", str(more))
    assert jobs.slurm.ended(more, 60) == "COMPLETED", jobs.everything()
    assert f"{name} has left" in (jobs.run / "logs" / "controller.n1.log").read_text()
    jobs.wait(job, "steps without it", 60, runs.further(jobs.run, 6))
    # What SLURM sends to the script before the time limit.
    jobs.slurm.call("scancel", "--batch", "--signal=USR1", str(job))
    jobs.wait(job, "a second start", START_S, lambda: jobs.story(job).count(f"job {job} ") > 2)
    kept = checkpoints.newest(jobs.run)
    assert kept == checkpoints.directory(jobs.run, metrics(jobs.run)[-1]["step"])
    assert f"job {job} is requeued with {kept.name}" in jobs.story(job)
    assert f"job {job} resumes from {kept.name}" in jobs.story(job)
    steps = metrics(jobs.run)[-1]["step"]
    jobs.wait(job, "a step of the second start", START_S, lambda: metrics(jobs.run)[-1]["step"] > steps)
    jobs.slurm.submit("--partition=urgent", "--nodes=3", "--exclusive", f"--output={jobs.tmp}/urgent.log", "--wrap=true")
    jobs.wait(job, "a third start", START_S, lambda: jobs.story(job).count(" resumes from ") > 1)
    kept = checkpoints.newest(jobs.run)
    assert kept == checkpoints.directory(jobs.run, metrics(jobs.run)[-1]["step"]), jobs.everything()
    assert f"requeued with {kept.name}: SLURM warned its steps of their end, as before a preemption" in jobs.story(job)
    assert jobs.slurm.fact(job, "Restarts") == "2"
    assert not (jobs.run / "slurm-lost.json").exists()
    jobs.slurm.call("scancel", str(job))
    assert jobs.ended(job) == "CANCELLED", jobs.everything()


HOSTILE = (
    "SLURM_LABELIO=1 SLURM_WAIT=1 SLURM_TIMELIMIT=1 SLURM_MEM_PER_CPU=1 SLURM_NTASKS_PER_NODE=4 SLURM_STDOUTMODE=none SLURM_REMOTE_CWD=/ "
    "SLURM_EXACT=1 SLURM_DISTRIBUTION=arbitrary SLURM_HOSTFILE=/nonexistent SLURM_GPUS_PER_TASK=8 SLURM_HINT=nomultithread SLURM_NTASKS=9 "
    "SLURM_IMMEDIATE=1 SLURM_OVERCOMMIT=1 SLURM_THREADS_PER_CORE=7 SLURM_EXCLUSIVE=1 SLURM_EXPORT_ENV=NONE SRUN_CPUS_PER_TASK=99"
)
"""Variables by which srun would do something else."""


@pytest.mark.thorough
def test_steps_have_what_the_batch_script_has_and_nothing_else_changes_them(jobs: Jobs) -> None:
    """A site's own script, whose output has no room, submitted without the user's environment."""
    script = jobs.tmp / "own.sh"
    settings = f"{HOSTILE} {MARK}={jobs.mark} PYTHONPATH={REPOSITORY} NCCL_CUMEM_ENABLE=1"
    script.write_text(f'#!/bin/bash\nexport {settings}\nexec {sys.executable} -m asyncmoe.launch.slurm "$@" > /dev/full\n')
    places = (f"run.dir={jobs.run}", f"model.path={jobs.model}")
    options = ("--parsable", "--export=NONE", "--exclusive", "--mem=0", "--nodes=2", f"--output={jobs.tmp}/%j.log")
    job = int(jobs.slurm.call("sbatch", *options, str(script), "examples/demo.yaml", *places, *SMALL, "run.steps=20").stdout)
    jobs.wait(job, "a step", START_S, lambda: len(metrics(jobs.run)) > 4)
    parts = ("task .* rollout ", "task .* engine ", "task .*launch.torchrun ", "asyncmoe.platform.sglang", "-m asyncmoe.trainer ")
    lines = marked(jobs.mark)
    assert all(any(re.search(part, line) for line in lines) for part in parts), lines
    assert nccl_settings(jobs.run, jobs.mark) == {"NCCL_CUMEM_ENABLE": "1"}
    assert jobs.ended(job) == "COMPLETED", jobs.everything()
    assert runs.summary_of(jobs.run)["steps"] == 20
