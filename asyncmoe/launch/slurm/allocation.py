"""Which nodes SLURM gave this job, from the variables it sets in a batch script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncmoe.errors import UserError

Expand = Callable[[str], tuple[str, ...]]
"""From "n[1-3]" to its nodes; `control.hostnames` asks SLURM itself."""


@dataclass(frozen=True)
class JobComponent:
    """One component of a heterogeneous job, or the whole of any other.

    Attributes:
        job: what `squeue --steps` knows its steps by: "12", "12_3" of an array, the component's own number in a heterogeneous job.
        nodes: their SLURM names, in SLURM's order.
        index: what `srun --het-group` calls it; None where there are no components.
    """

    job: str
    nodes: tuple[str, ...]
    index: int | None = None


@dataclass(frozen=True)
class Allocation:
    """A job that runs.

    Attributes:
        job: SLURM_JOB_ID.
        name: what SLURM's commands must be told. The last task of an array has the number of the whole array, so one is named
            "ARRAY_TASK" (https://slurm.schedmd.com/job_array.html).
        restarts: how often it went back into the queue.
    """

    job: int
    name: str
    restarts: int
    groups: tuple[JobComponent, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for group in self.groups for node in group.nodes)

    def group_of(self, node: str) -> JobComponent:
        """The component a node belongs to."""
        return next(group for group in self.groups if node in group.nodes)


def read(environ: Mapping[str, str], expand: Expand) -> Allocation:
    """What SLURM's variables say.

    Raises:
        UserError: this is no SLURM job.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
        cure = "start it with: sbatch --nodes=N slurm/train.sbatch CONFIG; on a machine without SLURM: asyncmoe run CONFIG"
        raise UserError("SLURM_JOB_ID", got="no such variable", expected="a SLURM job", cure=cure)
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
