"""The task of a step: `python -m asyncmoe.launch.slurm.task -m MODULE ARGUMENTS` runs MODULE as `python -m` does, and translates SLURM's
signals.

SLURM sends a signal to every process of a step. SIGURG asks a part to stop: only the task handles it, by raising the signal that its part
expects. SIGHUP ends all processes. SIGTERM warns of the end of the job, as before a preemption: all processes of a run block it except the
controller's task, which treats it as SIGURG, so that the trainer saves.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Run the module to its end."""
    _, _, module, *arguments = sys.argv
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if arguments[0] in ("rollout", "engine"):
        stop_as(signal.SIGINT, signal.SIGURG, *([signal.SIGTERM] if arguments[0] == "rollout" else []))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def stop_as(number: signal.Signals, *asked: signal.Signals) -> None:
    """Send this process the signal `number` once, when the first of `asked` arrives, because the batch script's own request may follow a
    warning. A thread waits for them, because uvloop handles a signal twice if another one's handler raises it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)

    def wait() -> None:
        signal.sigwait(asked)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, name="asked to stop", daemon=True).start()


if __name__ == "__main__":
    main()
