"""The nodes that SLURM allocated to this job, from the variables that it sets in a batch script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncmoe.errors import UserError

Expand = Callable[[str], tuple[str, ...]]
"""Expands a node list such as "n[1-3]"; `control.hostnames` does so through SLURM."""


@dataclass(frozen=True)
class JobComponent:
    """One component of a heterogeneous job, or the whole of any other job.

    Attributes:
        job: job number that `squeue --steps` shows: "12", "12_3" for an array task, or a heterogeneous component's own number.
        nodes: SLURM's node names, in SLURM's order.
        index: index for `srun --het-group`; None if the job has no components.
    """

    job: str
    nodes: tuple[str, ...]
    index: int | None = None


@dataclass(frozen=True)
class Allocation:
    """The allocation of a running job.

    Attributes:
        job: SLURM_JOB_ID.
        name: the job's name for SLURM commands. The last task of an array has the number of the whole array, so tasks are named
            "ARRAY_TASK" (https://slurm.schedmd.com/job_array.html).
        restarts: how often the job was requeued.
        groups: the components of the job.
    """

    job: int
    name: str
    restarts: int
    groups: tuple[JobComponent, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for group in self.groups for node in group.nodes)

    def group_of(self, node: str) -> JobComponent:
        """Return the component that a node belongs to."""
        return next(group for group in self.groups if node in group.nodes)


def read(environ: Mapping[str, str], expand: Expand) -> Allocation:
    """Read the allocation from SLURM's variables.

    Raises:
        UserError: this process is not in a SLURM job.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
        hint = "start it with: sbatch --nodes=N slurm/train.sbatch CONFIG; on a machine without SLURM: asyncmoe run CONFIG"
        raise UserError("SLURM_JOB_ID", got="no such variable", expected="a SLURM job", hint=hint)
    job = int(environ["SLURM_JOB_ID"])
    array = environ.get("SLURM_ARRAY_JOB_ID")
    name = f"{array}_{environ['SLURM_ARRAY_TASK_ID']}" if array else str(job)
    size = int(environ.get("SLURM_HET_SIZE", "1"))
    if size > 1:
        groups = tuple(
            JobComponent(
                job=environ[f"SLURM_JOB_ID_HET_GROUP_{index}"],
                nodes=expand(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"]),
                index=index,
            )
            for index in range(size)
        )
    else:
        groups = (JobComponent(name, expand(environ["SLURM_JOB_NODELIST"])),)
    return Allocation(job, name, int(environ.get("SLURM_RESTART_COUNT", "0")), groups)
