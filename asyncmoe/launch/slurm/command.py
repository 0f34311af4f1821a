"""What this package's commands share: the signals that stop a batch script, and a main function that reports errors in one line."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from asyncmoe.launch import part
from asyncmoe.process import unbroken_output

_READ_BY_SRUN = re.compile(
    r"SRUN_\w+|SLURM_(BCAST\w*|CLUSTERS|COMPRESS|CONSTRAINT|CONTAINER|CORE_SPEC|CPUS_PER_GPU|DEBUG|DELAY_BOOT|DEPENDENCY|DISABLE_STATUS|DIST\w+"
    r"|EPILOG|EXACT|EXCLUSIVE|EXIT_\w+|EXPORT_ENV|GPUS|GPUS_PER_(SOCKET|TASK)|GPU_BIND|GRES|HINT|HOSTFILE|IMMEDIATE|LABELIO|MEM_\w+|NO_KILL"
    r"|NPROCS|NTASKS\w*|OPEN_MODE|OVERCOMMIT|PROLOG|REMOTE_CWD|RESV_PORTS|SIGNAL|SPREAD_JOB|SRUN_\w+|STD\w+MODE|STEP_GRES|TEST_EXEC|THREAD\w*"
    r"|TIMELIMIT|TRES_\w+|UNBUFFEREDIO|USE_MIN_NODES|WAIT|WORKING_DIR)"
)
"""Variables by which srun changes steps (srun(1), "Input environment variables"). sbatch sets some of them from options of the whole job,
where a step has one task a node, all of its memory and every GPU."""


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


def main(run: Callable[[Sequence[str], Stop], None]) -> None:
    """Install the signal handlers, then call `run` with the arguments of the command, as `part.main` does."""
    stop = Stop()
    unbroken_output()
    for name in filter(_READ_BY_SRUN.fullmatch, [*os.environ]):
        del os.environ[name]  # `steps.srun` says all that there is to say
    part.main(lambda: run(sys.argv[1:], stop))
