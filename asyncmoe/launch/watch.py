"""Supervise the processes of a run, on any machine, until all have ended, and apply the restart rule (`asyncmoe.launch.rule`).

Ctrl-C is passed to the controller, which makes the trainer save a checkpoint at its next step; the same command then resumes from that
checkpoint. A second Ctrl-C ends all processes at once.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncmoe import checkpoints, models, storage
from asyncmoe.checkpoints.copier import Copier
from asyncmoe.config import Config
from asyncmoe.config.devices import counted
from asyncmoe.errors import AsyncmoeError, Interrupted
from asyncmoe.interrupts import StopOnSignal
from asyncmoe.launch.rule import CONTROLLER, TRAINER, EndRun, Failure, LetGo, StartAgain, decide, titled
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process, RunParts, RunProcesses, certain, explained, only_lost, root_cause
from asyncmoe.launch.watching import Watcher
from asyncmoe.plan import switch
from asyncmoe.process import wait_until
from asyncmoe.telemetry import processes as recorded
from asyncmoe.telemetry.format import duration, percent
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.report import command
from asyncmoe.telemetry.samples.records import FOLDER as SAMPLES
from asyncmoe.telemetry.schema import METRICS
from asyncmoe.telemetry.summary import by_part, write_summary

PROFILE = "profile"
"""Folder of the trainer's profiles in a run's directory."""
_POLL_S = 0.25
_SETTLE_S, _UNEXPLAINED_S = 1.0, 6.0
"""Seconds to wait after the first failure for the other processes' reasons: the first value once a root cause is known, else the second."""
_GOODBYE_S = 60.0
"""Seconds that controller and trainer may end apart. torchrun's agents wait for each other at the end, and on busy machines 20 seconds were
not enough."""
_DISMISSED_S = 5.0
"""Seconds for engines to end after the controller has dismissed them; one that never joined is not dismissed."""
_INTERRUPTED = (-signal.SIGINT, 130)
"""Exit statuses of a command that received SIGINT before it installed its handler: during Python's start, and later."""


@dataclass(frozen=True)
class Stopping:
    """How a launcher learns that its run must stop, and makes the controller save it.

    Attributes:
        asked: whether the run must save a checkpoint and end.
        hurried: number of stop requests so far; one more ends the wait for the copy of the last checkpoint.
        at_once: the error with which the run must end at once, if it must.
        tell: asks the controller to stop, which may happen only once; returns false if it cannot be asked yet.
        seconds: returns the seconds allowed for a checkpoint, after which the run ends without one; called at the first request.
        settle_s: seconds to wait after a failure for later reports, even if its cause seems clear.
    """

    asked: Callable[[], bool]
    hurried: Callable[[], int]
    at_once: Callable[[], AsyncmoeError | None]
    tell: Callable[[Process], bool]
    seconds: Callable[[], float] = lambda: math.inf
    settle_s: float = 0.0


def watch(config: Config, parts: RunParts, end: Callable[[], None], stop: Stopping) -> None:
    """Start the processes of a prepared run, display and supervise it until it is finished or has stopped as requested.

    Args:
        end: ends all processes, however the run ends.

    Raises:
        AsyncmoeError: a process failed, or the run must end at once.
    """
    recorded.record(config.run.dir, "supervisor")
    watcher = Watcher(config)
    with Copier(config, stop.hurried), watcher, LiveView(config, feeds=(watcher.feed,)) as view:
        watcher.say = view.say
        try:
            _watch(_Supervision(config, parts, watcher, view, stop))
        finally:  # within the view, so that its loggers get the last records
            end()


def supervise(config: Config, parts: RunParts, end: Callable[[], None]) -> dict[str, object]:
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
        watch(config, parts, end, Stopping(lambda: signals.count > 0, lambda: signals.count, at_once, tell))
    except KeyboardInterrupt:
        raise Interrupted(saved("ended at once", config), signals.number) from None
    finally:
        signals.restore()
    try:
        if not signals.count:
            summary: dict[str, Any] = conclude(config.run.dir)
            for line in (*switched(config, summary["switch_seconds"]), *written(config)):
                print(line, file=sys.stderr, flush=True)
            return summary
        if read_steps(config.run.dir / METRICS):
            conclude(config.run.dir)
    except KeyboardInterrupt:
        raise Interrupted(f"{saved('stopped', config)}; asyncmoe report {config.run.dir} writes the report") from None
    raise Interrupted(saved("stopped", config), signals.number)


def begins(config: Config) -> str:
    """Describe what starts, from where, and where its processes write, because the first step takes a while."""
    newest = checkpoints.newest(config.run.dir)
    begin = "starting" if newest is None else f"resuming from {newest}"
    parts = f"{counted(config.trainer.ranks, 'trainer rank')}, {counted(config.engines.count, 'engine')}"
    return f"{begin}: {parts}; logs: {config.run.dir / 'logs'}"


def saved(ended: str, config: Config) -> str:
    """Describe which steps of a run that has `ended` are saved, and what the same command does next."""
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
    """Return lines that list a finished run's outputs and how to view them."""
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


def switched(config: Config, parts: Mapping[str, float] | None) -> list[str]:
    """Return a line on the switches of a run in turn: their median seconds, and the share of them that the bytes need by
    `asyncmoe plan`.

    Args:
        parts: `Summary.switch_seconds`.
    """
    if not parts or not config.in_turn:
        return []
    taken, least = sum(parts.values()), sum(switch.bound(config, models.hf_config_of(config)).values())
    return [f"switches: {duration(taken)} a step ({by_part(parts)}), of which the bytes alone need {percent(least / taken)}"]


def conclude(run_dir: Path) -> dict[str, object]:
    """Write summary and report of a run, and return the summary. Raises StorageError."""
    with storage.writing("summary and report of the run", run_dir):
        summary = write_summary(run_dir)
        command.write_or_explain(run_dir)
    return summary


def _watch(run: _Supervision) -> None:
    told, save_by, end_by, stop, processes = False, None, math.inf, run.stop, run.processes
    while not processes.finished:
        run.view.refresh()
        if (error := stop.at_once()) is not None:
            raise error
        now, controller = time.monotonic(), processes.controller
        if stop.asked():
            if save_by is None:
                save_by = now + (seconds := stop.seconds())
                how = f"{seconds:.0f} s for a checkpoint" if seconds < math.inf else "saving a checkpoint (Ctrl-C again ends at once)"
                run.view.say(f"stopping: {how}")
            # If the controller was interrupted early, no process had joined it; if the trainer is lost and not restarted, nothing can save.
            if controller is None or controller.returncode in (0, *_INTERRUPTED) or not processes.trainers or now > min(save_by, end_by):
                break
            told = told or stop.tell(controller)
        run.start_due(now)
        if run.watcher.hanging or (processes.failed and not (stop.asked() and _controller_ends(processes))):
            run.lost()
            continue
        controller = processes.controller
        late = [one for one in (controller, *processes.trainers) if one is not None and one.returncode is None]
        if controller is not None and processes.trainers and (controller not in late or late == [controller]):
            end_by = min(end_by, now + _GOODBYE_S)
            if late and now > end_by and not stop.asked():
                what = f"{late[0].name} did not end within {_GOODBYE_S:.0f} s of the other processes"
                raise AsyncmoeError(f"{what}; its log is {late[0].log}")
        time.sleep(_POLL_S)
    if processes.controller is not None and processes.controller.returncode == 0:
        _wait(processes.trainers, _GOODBYE_S, stop)
        _wait(processes.engines, _DISMISSED_S, stop)
    run.view.refresh()


class _Supervision:
    """Starts the parts of a run, and restarts lost ones."""

    def __init__(self, config: Config, parts: RunParts, watcher: Watcher, view: LiveView, stop: Stopping) -> None:
        self.processes, self.watcher, self.view, self.stop = RunProcesses(parts), watcher, view, stop
        self._config, self._parts = config, parts
        self._history: list[Failure] = []

    def start_due(self, now: float) -> None:
        """Start the parts that are due, unless the run is stopping, since a new start would have nothing to save.

        Raises:
            AsyncmoeError: one cannot be started.
        """
        due = [] if self.stop.asked() else [(name, part) for name, part in self._parts.items() if part.due <= now]
        for name, part in due:
            part.due = math.inf
            part.processes = part.start(self._parts[TRAINER if name == CONTROLLER else name].lost)

    def lost(self) -> None:
        """Apply the rule to parts that have failed or hang.

        Raises:
            AsyncmoeError: the run ends; names the root cause.
        """
        if hanging := self.watcher.hanging:
            error = AsyncmoeError(f"waited {self._config.watch.end_after_s:g} s (watch.end_after_s) for a heartbeat")
        else:
            error = _settled(self.processes, self.stop.settle_s)
        ended = self.processes.ended
        if hanging:
            ended[hanging] = "lost"
        steps = max((one.step for one in read_steps(self._config.run.dir / METRICS)), default=0)
        failure = Failure(ended, str(error), error.exit_code, steps)
        rules = {name: part.loss for name, part in self._parts.items()}
        match decide(rules, failure, self._history, self.stop.asked()):
            case EndRun(why):
                raise self._in_context(error, why, failure)
            case LetGo(part):
                self.view.say(f"the run goes on without {part}: {error}")
                del self._parts[part]
            case StartAgain() as again:
                self._again(again, failure, self.watcher.named(error))

    def _again(self, again: StartAgain, failure: Failure, why: AsyncmoeError) -> None:
        who = again.parts[0]
        when = f" in {again.after_s:.0f} s" if again.after_s else ""
        text = f"{titled(who)} starts again{when}, restart {again.row} of {again.most} without a new step: {why}"
        self.view.say(text)
        if who in (CONTROLLER, TRAINER):
            self.watcher.alert("controller_lost" if who == CONTROLLER else "trainer_lost", text)
        self._history.append(failure)
        for name in again.parts:
            part = self._parts[name]
            part.processes, part.lost = (), part.lost + 1
            part.end()
            self.watcher.forget(name)
            part.due = time.monotonic() + again.after_s

    def _in_context(self, error: AsyncmoeError, more: str, failure: Failure) -> AsyncmoeError:
        """Return the error that ends the run, with the earlier loss that may have caused it."""
        if not more and self._history and failure.step <= self._history[-1].step:
            more = f"{titled(next(iter(self._history[-1].ended)))} was lost before: {self._history[-1].why}"
        return AsyncmoeError(f"{error}; {more}", exit_code=error.exit_code) if more else error


def _controller_ends(processes: RunProcesses) -> bool:
    """Return whether failures follow from the end of a controller that was asked to stop, even if its end is not visible yet."""
    controller = processes.controller
    if controller is not None and controller.returncode is None:  # the trainer may have noticed the controller's end before this process
        return only_lost(processes.failed) and controller.wait(STOP_GRACE_S)
    return controller is not None and controller.returncode in _INTERRUPTED


def _wait(processes: Sequence[Process], seconds: float, stop: Stopping) -> None:
    """Wait up to `seconds` for all processes together. Raises AsyncmoeError if the run must end at once."""

    def ended() -> bool:
        if (error := stop.at_once()) is not None:
            raise error
        return all(one.returncode is not None for one in processes)

    wait_until(ended, seconds)


def _settled(processes: RunProcesses, settle_s: float) -> AsyncmoeError:
    """Wait for the reasons of failures, and return the root cause."""
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < max(_UNEXPLAINED_S, settle_s):
        if waited >= settle_s and (certain(processes.failed) or (waited > _SETTLE_S and explained(processes.failed))):
            break
        time.sleep(_POLL_S)
    return root_cause(processes.failed)
