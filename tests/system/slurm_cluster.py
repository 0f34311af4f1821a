"""A real SLURM of several nodes on this machine: munged, slurmctld and one slurmd a node, all on loopback.

Its nodes are daemons, not machines: they share the kernel, the cores and the host's name.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from asyncmoe.process import die_with_parent
from tests.system.runs import REPOSITORY, wait_for

DAEMONS = ("slurmctld", "slurmd", "munged")
_NODE_CPUS = 4
_ANSWER_S = 60.0
_POLL_S = 0.5
"""Every question to SLURM is a process."""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    absent = [name for name in DAEMONS if _program(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (requirements/system.sh)"
    return None if os.geteuid() == 0 else "SLURM's daemons want to be started by root"


class Cluster:
    """A cluster that runs. Jobs are submitted from the checkout's root.

    Attributes:
        directory: all output of its daemons.
        nodes: their names: n1, n2, ...
    """

    def __init__(self, directory: Path, nodes: int, daemons: ExitStack) -> None:
        self.directory, self._daemons = directory, daemons
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.environment = {**_without_slurm(os.environ), "SLURM_CONF": str(directory / "slurm.conf")}

    def call(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands."""
        done = subprocess.run(command, cwd=REPOSITORY, env=self.environment, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
        if check:
            assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def submit(self, *arguments: str, **environment: str) -> int:
        """Return the number of a new job. Keywords are its environment variables."""
        exported = ",".join(("ALL", *(f"{name}={value}" for name, value in environment.items())))
        return int(self.call("sbatch", "--parsable", f"--export={exported}", *arguments).stdout.split(";")[0])

    def fact(self, job: int | str, name: str) -> str:
        """One of the values of `scontrol show job`: "JobState", "Restarts"."""
        words = self.call("scontrol", "--oneliner", "show", "job", str(job)).stdout.split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def state(self, job: int | str) -> str:
        """RUNNING, COMPLETED, FAILED, ..."""
        return self.fact(job, "JobState")

    def ended(self, job: int | str, within_s: float) -> str:
        """The final state of a job."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        assert wait_for(lambda: self.state(job) in over, within_s, _POLL_S), f"job {job} is {self.state(job)} after {within_s} s"
        return self.state(job)

    def steps(self, job: int) -> dict[str, str]:
        """The running steps of a job, from name to number."""
        lines = self.call("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j", check=False).stdout.splitlines()
        return {line.split()[1]: line.split()[0] for line in lines}

    def queue(self) -> str:
        """What squeue prints; empty when no job waits or runs."""
        return self.call("squeue", "--noheader").stdout.strip()

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._daemons.enter_context(_daemon(self.directory, "slurmd", ["-D", "-N", node], self.environment, node))

    def lose_node(self, node: str) -> None:
        """End all processes of a node at once, like a power cut, and report it: SLURM itself notices only after SlurmdTimeout, 300 s."""
        at_node = [process for process in psutil.process_iter() if _is_at(process, node, str(self.directory))]
        for process in {*at_node, *(parent for task in at_node for parent in task.parents() if parent.name() == "slurmstepd")}:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def idle(self) -> bool:
        """Every node waits for jobs."""
        found = self.call("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", check=False).stdout.split()
        return {*found} == {*self.nodes}


@contextmanager
def cluster(directory: Path, nodes: int = 3) -> Iterator[Cluster]:
    """Start a cluster; at the end stop exactly its daemons and remaining jobs."""
    directory.mkdir(parents=True)
    daemons = ExitStack()
    made = Cluster(directory, nodes, daemons)
    (directory / "slurm.conf").write_text(configuration(directory, made.nodes, free_ports(nodes + 1)))
    with daemons:
        daemons.enter_context(_munged(directory))
        daemons.enter_context(_daemon(directory, "slurmctld", ["-D"], made.environment))
        for node in made.nodes:
            (directory / f"spool.{node}").mkdir()
            made.start_node(node)
        if not wait_for(made.idle, 30.0):
            raise AssertionError(f"not idle after 30 s: {made.call('sinfo', check=False)}\n{_logs(directory)}")
        try:
            yield made
        finally:
            made.call("scancel", "--user=root", check=False)
            wait_for(lambda: not made.queue(), 30.0)


def _is_at(process: psutil.Process, node: str, directory: str) -> bool:
    """Whether a process is a node's slurmd, or a task on that node, of the cluster in a directory."""
    try:
        environ, words = process.environ(), process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
    here = environ.get("SLURM_CONF", "").startswith(directory)
    return here and (environ.get("SLURMD_NODENAME") == node or words[-2:] == ["-N", node])


def configuration(directory: Path, nodes: tuple[str, ...], ports: list[int]) -> str:
    """slurm.conf. A requeued job waits as long as a credential is valid (slurm.conf(5), cred_expire): 5 s, the least there is, not 120."""
    head = {
        "ClusterName": "test",
        "SlurmctldHost": "localhost(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "AuthType": "auth/munge",
        "AuthInfo": f"cred_expire=5,socket={directory / 'munge.socket'}",
        "CredType": "cred/munge",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "bf_interval=1,batch_sched_delay=0,sched_interval=1,sched_min_interval=0",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": directory / "state",
        "SlurmdSpoolDir": directory / "spool.%n",
        "SlurmctldPidFile": directory / "slurmctld.pid",
        "SlurmdPidFile": directory / "slurmd.%n.pid",
        "ReturnToService": 2,
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "MpiDefault": "none",
        "SlurmdParameters": "config_overrides",
        "KillWait": 5,
        "MailProg": "/bin/true",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }
    lines = [f"{key}={value}" for key, value in head.items()]
    for node, port in zip(nodes, ports[1:], strict=True):
        lines.append(f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={_NODE_CPUS} State=UNKNOWN")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=120")
    return "\n".join([*lines, "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2", ""])


def free_ports(number: int) -> list[int]:
    """Return unused ports of this machine, below the ephemeral range."""
    found: list[int] = []
    for port in range(16000 + os.getpid() % 2000, 20000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            return found
    raise AssertionError("no free ports")


@contextmanager
def _daemon(directory: Path, name: str, arguments: list[str], environment: dict[str, str], node: str = "") -> Iterator[None]:
    """A daemon in the foreground, ended by its process number; slurmd leaves the steps of its jobs to themselves."""
    program = _program(name)
    log = directory / (f"{name}.{node}.log" if node else f"{name}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _munged(directory: Path) -> Iterator[None]:
    """munged with a socket and a key of its own, whether or not the machine has another."""
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {
        "key-file": key,
        "socket": directory / "munge.socket",
        "pid-file": directory / "munge.pid",
        "log-file": directory / "munge.log",
    }
    flags = [f"--{name}={path}" for name, path in files.items()] + [f"--seed-file={directory / 'munge.seed'}", "--force"]
    with _daemon(directory, "munged", ["--foreground", *flags], _without_slurm(os.environ)):
        if not wait_for(lambda: (directory / "munge.socket").exists(), 10.0):
            raise AssertionError(f"munged did not start\n{_logs(directory)}")
        yield


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _without_slurm(environ: os._Environ[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("SLURM")}


def _logs(directory: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(directory.glob("*.log")))
