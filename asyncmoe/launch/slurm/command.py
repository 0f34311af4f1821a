"""SLURM's influence on a batch script: signals that stop it, and variables that would change its steps."""

from __future__ import annotations

import os
import re
import signal
from types import FrameType

_READ_BY_SRUN = re.compile(
    r"SRUN_\w+|SLURM_(BCAST\w*|CLUSTERS|COMPRESS|CONSTRAINT|CONTAINER|CORE_SPEC|CPUS_PER_GPU|DEBUG|DELAY_BOOT|DEPENDENCY|DISABLE_STATUS|DIST\w+"
    r"|EPILOG|EXACT|EXCLUSIVE|EXIT_\w+|EXPORT_ENV|GPUS|GPUS_PER_(SOCKET|TASK)|GPU_BIND|GRES|HINT|HOSTFILE|IMMEDIATE|LABELIO|MEM_\w+|NO_KILL"
    r"|NPROCS|NTASKS\w*|OPEN_MODE|OVERCOMMIT|PROLOG|REMOTE_CWD|RESV_PORTS|SIGNAL|SPREAD_JOB|SRUN_\w+|STD\w+MODE|STEP_GRES|TEST_EXEC|THREAD\w*"
    r"|TIMELIMIT|TRES_\w+|UNBUFFEREDIO|USE_MIN_NODES|WAIT|WORKING_DIR)"
)
"""Variables by which srun changes steps (srun(1), "Input environment variables"). sbatch sets some of them from options of the whole job,
while a step has one task per node, and all memory and GPUs of the node."""


class Stop:
    """The stop requests received so far. Create it before any long import, because an unhandled signal ends the process.

    Attributes:
        requeue: SIGUSR1, which SLURM sends before the time limit, was received: save, end and requeue.
        save: SIGUSR1 or SIGINT was received: save and end.
        now: SIGTERM was received: end.
    """

    def __init__(self) -> None:
        self.requeue = self.save = self.now = False
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requeue |= number == signal.SIGUSR1
        self.save |= number in (signal.SIGUSR1, signal.SIGINT)
        self.now |= number == signal.SIGTERM


def forget_options() -> None:
    """Remove the variables that would override srun's arguments: `steps.srun` sets all it needs."""
    for name in filter(_READ_BY_SRUN.fullmatch, [*os.environ]):
        del os.environ[name]
