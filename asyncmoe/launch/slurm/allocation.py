"""The nodes that SLURM allocated to this job, from the variables that it sets in a batch script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncmoe.errors import UserError

Expand = Callable[[str], tuple[str, ...]]
"""Expands a node list such as "n[1-3]"; `control.hostnames` does so through SLURM."""


@dataclass(frozen=True)
class Allocation:
    """The allocation of a running job.

    Attributes:
        job: SLURM_JOB_ID.
        name: the job's name for SLURM commands. The last task of an array has the number of the whole array, so tasks are named
            "ARRAY_TASK" (https://slurm.schedmd.com/job_array.html).
        restarts: how often the job was requeued.
        nodes: SLURM's node names, in SLURM's order.
    """

    job: int
    name: str
    restarts: int
    nodes: tuple[str, ...]


def read(environ: Mapping[str, str], expand: Expand) -> Allocation:
    """Read the allocation from SLURM's variables.

    Raises:
        UserError: this process is not in a SLURM job, or in one of several components.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
        hint = "start it with: sbatch --nodes=N slurm/train.sbatch CONFIG; on a machine without SLURM: asyncmoe run CONFIG"
        raise UserError("SLURM_JOB_ID", got="no such variable", expected="a SLURM job", hint=hint)
    if "SLURM_HET_SIZE" in environ:
        hint = "nodes of another kind join with slurm/rollout.sbatch"
        raise UserError("job", got="a heterogeneous one", expected="one component", hint=hint)
    job = environ["SLURM_JOB_ID"]
    name = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}" if "SLURM_ARRAY_JOB_ID" in environ else job
    return Allocation(int(job), name, int(environ.get("SLURM_RESTART_COUNT", "0")), expand(environ["SLURM_JOB_NODELIST"]))
