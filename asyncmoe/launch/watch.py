"""Supervise the processes of a run, on any machine, until all have ended or one has failed.

Ctrl-C is passed to the controller, which has the trainer save a checkpoint at its next step; the same command then resumes from that
checkpoint. A second Ctrl-C ends all processes at once.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
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
from asyncmoe.process import wait_until
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
"""Seconds for controller and trainer to end after each other. torchrun's agents wait for each other at the end, and on busy machines 20
seconds were not enough."""
_INTERRUPTED = (-signal.SIGINT, 130)
"""Exit statuses of a command that received SIGINT before it installed its handler: while Python started, and later."""


@dataclass(frozen=True)
class Stopping:
    """How a launcher hears that its run is to stop, and has the controller save it.

    Attributes:
        asked: whether the run is to save a checkpoint and end.
        hurried: how often its user has insisted; once more ends the wait for the copy of the last checkpoint.
        at_once: the error with which the run is to end at once, if it is.
        tell: asks the controller to stop, which may happen only once; false: it cannot be asked yet.
        seconds: for a checkpoint, after which the run ends as it is; called at the first request.
    """

    asked: Callable[[], bool]
    hurried: Callable[[], int]
    at_once: Callable[[], AsyncmoeError | None]
    tell: Callable[[Process], bool]
    seconds: Callable[[], float] = lambda: math.inf


def watch(config: Config, start: Callable[[ExitStack], Processes], stop: Stopping) -> None:
    """Start the processes of a prepared run, show and supervise it until it is finished or has stopped as it was asked to.

    Args:
        start: starts the processes and registers the end of each on the stack.

    Raises:
        AsyncmoeError: a process failed, or the run is to end at once.
    """
    recorded.record(config.run.dir, "supervisor")
    watcher = Watcher(config)
    restarts, controllers = PartRestarts(config, watcher, "trainer"), PartRestarts(config, watcher, "controller")
    with (
        Copier(config, stop.hurried),
        watcher,
        LiveView(config, sinks=(restarts.newest, controllers.newest, watcher), health=watcher.health) as view,
        ExitStack() as ending,  # before the view: loggers are sent the last records
    ):
        watcher.say = view.say
        _watch(start(ending), view, stop, _Restarts(view, stop, restarts, controllers))


def supervise(config: Config, start: Callable[[ExitStack], Processes]) -> dict[str, object]:
    """Run `watch` from a terminal, and return the summary of the run.

    Raises:
        AsyncmoeError: a process failed.
        Interrupted: the user stopped the run; the text says what is saved.
    """
    signals = StopOnSignal()

    def at_once() -> AsyncmoeError | None:
        return Interrupted(saved("ended at once", config), signals.number) if signals.count > 1 else None

    def tell(controller: Process) -> bool:
        controller.signal(signal.SIGINT)
        return True

    try:
        print(begins(config), flush=True)
        watch(config, start, Stopping(lambda: signals.count > 0, lambda: signals.count, at_once, tell))
    except KeyboardInterrupt:
        raise Interrupted(saved("ended at once", config), signals.number) from None
    finally:
        signals.restore()
    try:
        if not signals.count:
            summary = conclude(config.run.dir)
            for line in written(config):
                print(line, file=sys.stderr, flush=True)
            return summary
        if read_steps(config.run.dir / METRICS):
            conclude(config.run.dir)
    except KeyboardInterrupt:
        raise Interrupted(f"{saved('stopped', config)}; asyncmoe report {config.run.dir} writes the report") from None
    raise Interrupted(saved("stopped", config), signals.number)


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


def conclude(run_dir: Path) -> dict[str, object]:
    """Write summary and report of a run, and return the summary. Raises StorageError."""
    with storage.writing("summary and report of the run", run_dir):
        summary = write_summary(run_dir)
        command.write_or_explain(run_dir)
    return summary


def _watch(processes: Processes, view: LiveView, stop: Stopping, restarts: _Restarts) -> None:
    told, save_by, end_by = False, None, math.inf
    while not processes.finished:
        silent = _refresh(view)
        if (error := stop.at_once()) is not None:
            raise error
        restarts.prepare(processes)
        now, controller = time.monotonic(), processes.controller
        if stop.asked():
            if save_by is None:
                save_by = now + (seconds := stop.seconds())
                how = f"{seconds:.0f} s for a checkpoint" if seconds < math.inf else "saving a checkpoint (Ctrl-C again ends at once)"
                view.say(f"stopping: {how}")
            # An interrupted controller was joined by no other process. Without a trainer, lost and not started again, none saves.
            if controller.returncode in (0, *_INTERRUPTED) or not processes.trainers or now > min(save_by, end_by):
                break
            told = told or stop.tell(controller)
        if silent is not None or (processes.failed and not (stop.asked() and _controller_ends(processes))):
            processes = restarts.again(processes, silent or _settled(processes))
            continue
        if controller.returncode is not None or all(trainer.returncode is not None for trainer in processes.trainers):
            end_by = min(end_by, now + _GOODBYE_S)
            late = [one for one in (controller, *processes.trainers) if one.returncode is None]
            if late and now > end_by and not stop.asked():
                raise AsyncmoeError(f"{late[0].name} did not end within {_GOODBYE_S:.0f} s of the others; its log is {late[0].log}")
        time.sleep(_POLL_S)
    if processes.controller.returncode == 0:  # an engine that it has not dismissed, because it never joined, would wait for it
        _wait(processes.trainers, _GOODBYE_S, stop)
        _wait(processes.engines, STOP_GRACE_S, stop)
    view.refresh()


def _refresh(view: LiveView) -> ProcessSilent | None:
    """Show new records; return the error of a process that hangs."""
    try:
        view.refresh()
    except ProcessSilent as silent:
        return silent
    return None


@dataclass(frozen=True)
class _Restarts:
    """Starts again what was lost."""

    view: LiveView
    stop: Stopping
    trainers: PartRestarts
    controllers: PartRestarts

    def prepare(self, processes: Processes) -> None:
        """Be ready for the loss of controller or trainer, if they can be started again."""
        if self.stop.asked():
            return
        if processes.controllers is not None:
            self.controllers.prepare(processes.controllers)
        if processes.starter is not None and processes.trainers:
            self.trainers.prepare(processes.starter)

    def again(self, processes: Processes, error: AsyncmoeError) -> Processes:
        """Start the controller again if it was lost, else the trainer. Nothing is left to save if the run stops meanwhile.

        Raises:
            AsyncmoeError: the run ends; names the root cause.
        """
        lost = processes.controller_lost or (isinstance(error, ProcessSilent) and error.controller)
        if lost and processes.controllers is not None:
            others, epoch = (lambda: processes.engines_go_on), self.trainers.count
            started = self.controllers.again(error, processes.controllers, others, self.stop.asked, self.view, epoch)
            if started is None:
                return replace(processes, trainers=()) if self.stop.asked() else processes
            return replace(processes, controller=started[0])
        others, epoch = (lambda: processes.others_go_on), self.trainers.count + 1
        started = self.trainers.again(error, processes.starter, others, self.stop.asked, self.view, epoch)
        return replace(processes, trainers=started or ())


def _controller_ends(processes: Processes) -> bool:
    """Return whether failures follow from the end of a controller that was asked to stop, which only the next look at it will show."""
    controller = processes.controller
    if controller.returncode is None:  # the trainer may have noticed the controller's end before this process did
        return only_lost(processes.failed) and controller.wait(STOP_GRACE_S)
    return controller.returncode in _INTERRUPTED


def _wait(processes: Sequence[Process], seconds: float, stop: Stopping) -> None:
    """Wait up to `seconds` for all processes together. Raises AsyncmoeError if the run is to end at once."""

    def ended() -> bool:
        if (error := stop.at_once()) is not None:
            raise error
        return all(one.returncode is not None for one in processes)

    wait_until(ended, seconds)


def _settled(processes: Processes) -> AsyncmoeError:
    """Wait for the reasons of failures, and return the root cause."""
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < max(_UNEXPLAINED_S, processes.settle_s):
        if waited >= processes.settle_s and (certain(processes.failed) or (waited > _SETTLE_S and explained(processes.failed))):
            break
        time.sleep(_POLL_S)
    return failure(processes.failed)
