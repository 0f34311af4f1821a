"""Supervise the processes of a run, on any machine, until all have ended or one has failed.

Ctrl-C is passed to the controller, which has the trainer save a checkpoint at its next step; the same command then resumes from that
checkpoint. A second Ctrl-C ends all processes at once.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from asyncmoe import checkpoints, storage
from asyncmoe.checkpoints.copier import Copier
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, Interrupted
from asyncmoe.launch.failures import certain, explained, failure, only_lost
from asyncmoe.launch.restarts import PartRestarts
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process, Processes
from asyncmoe.launch.stop_signals import StopOnSignal
from asyncmoe.launch.watching import ProcessSilent, Watcher
from asyncmoe.telemetry import processes as recorded
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.report import command
from asyncmoe.telemetry.samples.records import FOLDER as SAMPLES
from asyncmoe.telemetry.schema import METRICS
from asyncmoe.telemetry.summary import write_summary

PROFILE = "profile"
"""Folder of a run that the trainer writes profiles to."""
_POLL_S = 0.25
_SETTLE_S, _UNEXPLAINED_S = 1.0, 6.0
"""Seconds to wait after the first failure for the other processes' reasons: the first once a root cause is known, else the second."""
_GOODBYE_S = 60.0
"""Seconds for ranks that have taken leave of the controller to end. torchrun's agents wait for each other at the end, and on busy machines
20 seconds were not enough."""
_INTERRUPTED = (-signal.SIGINT, 130)
"""Exit statuses of a command that received SIGINT before it installed its handler: while Python started, and later."""


def supervise(config: Config, start: Callable[[ExitStack], Processes]) -> dict[str, object]:
    """Start the processes of a prepared run, show and supervise it to its end, and return its summary.

    Args:
        start: starts the processes and registers the end of each on the stack.

    Raises:
        AsyncmoeError: a process failed.
        Interrupted: the user stopped the run; the text says what is saved.
    """
    stop = StopOnSignal()
    try:
        recorded.record(config.run.dir, "supervisor")
        watcher = Watcher(config)
        restarts, controllers = PartRestarts(config, watcher, "trainer"), PartRestarts(config, watcher, "controller")
        print(begins(config), flush=True)
        with (
            Copier(config, lambda: stop.count),
            watcher,
            LiveView(config, sinks=(restarts.newest, controllers.newest, watcher), health=watcher.health) as view,
            ExitStack() as ending,
        ):
            watcher.say = view.say
            _watch(config, start(ending), view, stop, _Restarts(config, view, stop, restarts, controllers))
    except KeyboardInterrupt:
        raise Interrupted(saved("ended at once", config), stop.number) from None
    finally:
        stop.restore()
    try:
        if not stop.count:
            summary = _conclude(config.run.dir)
            for line in written(config):
                print(line, file=sys.stderr, flush=True)
            return summary
        if read_steps(config.run.dir / METRICS):
            _conclude(config.run.dir)
    except KeyboardInterrupt:
        raise Interrupted(f"{saved('stopped', config)}; asyncmoe report {config.run.dir} writes the report") from None
    raise Interrupted(saved("stopped", config), stop.number)


def begins(config: Config) -> str:
    """Say what starts now, from where, and where its processes write: the first step takes a while."""
    ranks, engines, newest = config.trainer.ranks, config.engines.count, checkpoints.newest(config.run.dir)
    begin = "starting" if newest is None else f"resuming from {newest}"
    parts = f"{ranks} trainer rank{'s' * (ranks > 1)}, {engines} engine{'s' * (engines > 1)}"
    return f"{begin}: {parts}; logs: {config.run.dir / 'logs'}"


def saved(ended: str, config: Config) -> str:
    """Say which steps of a run that has `ended` are saved, and what the same command does next."""
    steps, newest = read_steps(config.run.dir / METRICS), checkpoints.newest(config.run.dir)
    if newest is None:
        return f"{ended} before the first {'checkpoint' if steps else 'step'}; the same command starts over"
    step, total = int(checkpoints.facts(newest)["step"]), config.warmup.steps + config.run.steps
    taken = max([step, *(record.step for record in steps[-1:])])
    if step >= total:
        return f"{ended} after the last step: the run is complete, and saved in {newest}"
    kept = "which is saved" if taken == step else f"saved up to step {step}"
    return f"{ended} at step {taken} of {total}, {kept}; the same command resumes from {newest}"


def written(config: Config) -> list[str]:
    """Return what a finished run has left to look at, and how, in lines."""
    run_dir = config.run.dir
    lines = [f"report: {run_dir / 'report.html'}"] if (run_dir / "report.html").exists() else []
    if (run_dir / SAMPLES).is_dir():
        lines.append(f"samples: asyncmoe show {run_dir}")
    if config.telemetry.profile is not None:
        profiles = sorted(path.name for path in (run_dir / PROFILE).glob("step-*"))
        lines.append(f"profile: {run_dir / PROFILE} has {', '.join(profiles) or 'nothing; logs/trainer.log says why'}")
    if (newest := checkpoints.newest(run_dir)) is not None:
        lines.append(f"checkpoint: {newest}; asyncmoe export {run_dir} OUT writes a model of it")
    return lines


def _conclude(run_dir: Path) -> dict[str, object]:
    with storage.writing("summary and report of the run", run_dir):
        summary = write_summary(run_dir)
        command.write_or_explain(run_dir)
    return summary


def _watch(config: Config, processes: Processes, view: LiveView, stop: StopOnSignal, restarts: _Restarts) -> None:
    told = 0
    while not processes.finished:
        try:
            view.refresh()
        except ProcessSilent as silent:
            processes = restarts.again(processes, silent)
        restarts.prepare(processes)
        controller = processes.controller
        if stop.count > told:
            told = stop.count
            if told > 1:
                raise Interrupted(saved("ended at once", config), stop.number)
            view.say("stopping: saving a checkpoint (Ctrl-C again ends at once)")
            controller.signal(signal.SIGINT)
        if stop.count and controller.returncode in _INTERRUPTED:  # no other process has joined it
            view.refresh()
            return
        if stop.count and controller.returncode == 0:  # the trainer has the request, or never joined
            _late(processes.trainers)
            break
        if stop.count and not processes.trainers:  # a lost trainer that was not started again: there is none to save a checkpoint
            return
        if processes.failed:
            if stop.count and _controller_ends(processes):
                continue
            _settle(processes)
            processes = restarts.again(processes, failure(processes.failed))
            continue
        if all(trainer.returncode == 0 for trainer in processes.trainers) and not controller.wait(STOP_GRACE_S):
            raise AsyncmoeError(f"the controller did not end within {STOP_GRACE_S:.0f} s of the trainer; its log is {controller.log}")
        if controller.returncode == 0 and _late(processes.trainers, _GOODBYE_S):
            raise AsyncmoeError(f"the controller ended before the trainer; its log is {controller.log}")
        time.sleep(_POLL_S)
    # The controller has dismissed the engines that joined. An engine that has not joined would wait for the controller.
    _late(processes.engines)
    view.refresh()


@dataclass(frozen=True)
class _Restarts:
    """Starts again what was lost."""

    config: Config
    view: LiveView
    stop: StopOnSignal
    trainers: PartRestarts
    controllers: PartRestarts

    def prepare(self, processes: Processes) -> None:
        """Be ready for the loss of controller or trainer, if they can be started again."""
        if self._stopping():
            return
        if processes.controllers is not None:
            self.controllers.prepare(processes.controllers)
        if processes.starter is not None and processes.trainers:
            self.trainers.prepare(processes.starter)

    def again(self, processes: Processes, error: AsyncmoeError) -> Processes:
        """Start the controller again if it was lost, else the trainer.

        Raises:
            AsyncmoeError: the run ends; names the root cause.
            Interrupted: the user stops the run, and there is no controller to save it.
        """
        lost = processes.controller_lost or (isinstance(error, ProcessSilent) and error.controller)
        if lost and processes.controllers is not None:
            others, epoch = (lambda: processes.engines_go_on), self.trainers.count
            controller = self.controllers.again(error, processes.controllers, others, self._stopping, self.view, epoch)
            if controller is None and self._stopping():
                raise Interrupted(saved("ended at once", self.config), self.stop.number)
            return processes if controller is None else replace(processes, controller=controller)
        others, epoch = (lambda: processes.others_go_on), self.trainers.count + 1
        trainers = self.trainers.again(error, processes.starter, others, self._stopping, self.view, epoch)
        return replace(processes, trainers=trainers or ())

    def _stopping(self) -> bool:
        return self.stop.count > 0


def _controller_ends(processes: Processes) -> bool:
    """Return whether failures follow from the end of a controller that was asked to stop, which only the next look at it will show."""
    controller = processes.controller
    if controller.returncode is None:  # the trainer may have noticed the controller's end before this process did
        return only_lost(processes.failed) and controller.wait(STOP_GRACE_S)
    return controller.returncode in _INTERRUPTED


def _late(processes: tuple[Process, ...], seconds: float = STOP_GRACE_S) -> list[Process]:
    """Wait up to `seconds` for all processes together, and return the running ones."""
    until = time.monotonic() + seconds
    return [process for process in processes if not process.wait(max(0.0, until - time.monotonic()))]


def _settle(processes: Processes) -> None:
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < _UNEXPLAINED_S and not certain(processes.failed):
        if waited > _SETTLE_S and explained(processes.failed):
            return
        time.sleep(_POLL_S)
