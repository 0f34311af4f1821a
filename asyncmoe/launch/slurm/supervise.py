"""A run in one allocation: start all parts as steps, supervise them, and end them in any case."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncmoe import checkpoints
from asyncmoe import config as configuration
from asyncmoe.checkpoints.copier import Copier
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch import local
from asyncmoe.launch.restarts import PartRestarts
from asyncmoe.launch.slurm import allocation, control, outcome, parts, steps
from asyncmoe.launch.slurm.allocation import Allocation
from asyncmoe.launch.slurm.command import Stop
from asyncmoe.launch.slurm.parts import Part, StepStarter
from asyncmoe.launch.watching import ProcessSilent, Watcher
from asyncmoe.models.hub import with_local_model
from asyncmoe.process import wait_until
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.live import LiveView

_POLL_S = 0.25
_END_GRACE_S = 60.0
"""Seconds allowed between the ends of controller and trainer."""
_LEAVE_S = 20.0
"""Seconds for engines to end after controller and trainer."""
_ASK_AGAIN_S = 2.0
_SIGNALLED_S = 300.0
"""Seconds before the time limit at which slurm/train.sbatch has SIGUSR1 sent."""
_KEPT_S = 45.0
"""Seconds reserved before the time limit to end parts that did not stop by themselves, and to requeue."""
_UNLIMITED_S = 3600.0
"""Upper bound in seconds for a last step and its checkpoint, if the time limit is far away."""
_INTERRUPTED = 130
"""Exit status of a command that received SIGINT before it installed its handler."""


def run(path: Path, overrides: Sequence[str], stop: Stop) -> None:
    """Run a configuration in this allocation, or resume it from its newest checkpoint.

    Returns when the run is finished or the job is requeued.

    Raises:
        UserError: the configuration, the model, the allocation or the run directory cannot be used.
        AsyncmoeError: a part failed (the error is the root cause), or the run was stopped.
    """
    where = allocation.read(os.environ, control.hostnames)
    config = configuration.load(path, overrides)
    config = with_local_model(configuration.load(path, [*overrides, *steps.implied(where, config)]))
    placed = steps.place(where, config)
    if (gpus := os.environ.get("SLURM_GPUS_ON_NODE", "")).isdecimal():
        steps.check_gpus(placed, config, int(gpus))
    with local.claim(config.run.dir):
        resolved = local.prepare(config)
        address, program = control.address(placed.trainers[0]), steps.container(os.environ, sys.executable)

        def trainer(epoch: int) -> steps.JobStep:
            master = (address, steps.master_port(where.job, where.restarts, epoch))
            return steps.trainer(where, placed, config, resolved, master, program, epoch)

        def controller(epoch: int) -> steps.JobStep:
            return steps.controller(where, placed, config, resolved, program, epoch)

        engines = steps.engines(where, placed, config, resolved, program)
        before = checkpoints.newest(config.run.dir)
        print(_describe(where, placed, config, before), flush=True)
        cause = _supervise(where, config, controller, engines, trainer, stop)
        outcome.conclude(where, config, before, cause, stop)


def _describe(where: Allocation, placed: steps.Placement, config: Config, newest: Path | None) -> str:
    start = "starts" if newest is None else f"resumes from {newest.name}"
    engines = ", ".join(f"{node} ({len(machine.numbers)})" for node, machine in placed.engines)
    unused = f"; not used: {', '.join(placed.unused)}" if placed.unused else ""
    return (
        f"job {where.name} {start}: controller on {placed.controller}; engines on {engines}; {placed.ranks} trainer rank(s) on each of "
        f"{', '.join(placed.trainers)}{unused}; logs in {config.run.dir / 'logs'}"
    )


def _supervise(
    where: Allocation,
    config: Config,
    controller: Callable[[int], steps.JobStep],
    engines: Sequence[steps.JobStep],
    trainer: Callable[[int], steps.JobStep],
    stop: Stop,
) -> AsyncmoeError | None:
    """Start and supervise all steps; return the root cause of a failure, or None if all ended well or on request."""
    started: list[Part] = []
    processes.record(config.run.dir, "supervisor")
    watcher = Watcher(config)
    restarts, controllers = PartRestarts(config, watcher, "trainer"), PartRestarts(config, watcher, "controller")
    # The view ends after the parts: loggers are sent the last records.
    with (
        Copier(config, lambda: int(stop.now)),
        watcher,
        LiveView(config, sinks=(restarts.newest, controllers.newest, watcher), health=watcher.health) as view,
    ):
        watcher.say = view.say
        try:
            ranks, serving = StepStarter(trainer, started), StepStarter(controller, started)
            serving.start(0)
            parts.start(engines, started)
            running = started[1:]
            ranks.start(0)
            again = controllers if config.survives_controller else None
            return _watch(where, _Job(running, serving, ranks, restarts, again), view, stop)
        finally:
            parts.end_all(started)


class _Job:
    """The parts of a running job.

    Attributes:
        controller, trainer: the parts of this name, of the newest starts.

    Args:
        controllers: None: the engines would end with the controller.
    """

    def __init__(
        self,
        engines: Sequence[Part],
        controller: StepStarter,
        trainer: StepStarter,
        restarts: PartRestarts,
        controllers: PartRestarts | None,
    ) -> None:
        self._engines, self._controller, self._trainer = engines, controller, trainer
        self._restarts, self._controllers = restarts, controllers

    @property
    def controller(self) -> Part:
        return self._controller.part

    @property
    def trainer(self) -> Part:
        return self._trainer.part

    @property
    def everyone(self) -> list[Part]:
        return [self.controller, *self._engines, self.trainer]

    def again(self, silent: ProcessSilent | None, view: LiveView, stop: Stop) -> AsyncmoeError | None:
        """Start the controller again if it was lost, else the trainer; see `PartRestarts.again`.

        Args:
            silent: the failure, if a process hangs.

        Returns:
            The root cause if the job ends; None if a part was started, or is not because the job began to stop.

        Raises:
            ProcessSilent: the job ends because of it.
        """

        def stopping() -> bool:
            return stop.save or stop.now

        def engines() -> bool:
            return not any(part.failed for part in self._engines)

        error, epoch = silent or parts.first_cause(self.everyone), self._restarts.count
        lost = self.controller.killed or (silent is not None and silent.controller)
        try:
            if lost and self._controllers is not None:
                self._controllers.again(error, self._controller, engines, stopping, view, epoch)
            else:
                self._restarts.again(error, self._trainer, lambda: self.controller.status is None and engines(), stopping, view, epoch + 1)
        except ProcessSilent:
            raise  # the watcher names the process
        except AsyncmoeError as ended:
            return ended
        return None


def _watch(where: Allocation, job: _Job, view: LiveView, stop: Stop) -> AsyncmoeError | None:
    saving: _Saving | None = None
    end_by = float("inf")
    while job.controller.status is None or job.trainer.status is None:
        silent = _refresh(view)
        now = time.monotonic()
        if stop.now:
            raise outcome.told_to_end(where)
        if silent is not None or any(_bad(part, stop) for part in job.everyone):
            ended = job.again(silent, view, stop)
            if ended is not None or (stop.save and job.trainer.failed):
                return ended
            continue
        if stop.save and saving is None:
            saving = _Saving(job.controller, now + _time_to_save(where))
            view.say(f"stopping: {saving.by - now:.0f} s for a checkpoint")
        if saving is not None and saving.over(now):
            return None
        if job.controller.status is not None or job.trainer.status is not None:
            end_by = min(end_by, now + _END_GRACE_S)
        if now > end_by:
            if saving is not None:
                return None
            late = job.trainer if job.trainer.status is None else job.controller
            what = f"{late.step.name} on {','.join(late.step.nodes)} did not end within {_END_GRACE_S:.0f} s of the others"
            raise AsyncmoeError(f"{what}; its log is {late.step.logs[late.step.nodes[0]]}")
        time.sleep(_POLL_S)
    view.refresh()
    if any(_bad(part, stop) for part in (job.controller, job.trainer)):
        return parts.first_cause(job.everyone)
    # The controller has dismissed the engines that joined. An engine that has not joined would wait for the controller.
    wait_until(lambda: all(part.status is not None for part in job.everyone), _LEAVE_S)
    return None


def _refresh(view: LiveView) -> ProcessSilent | None:
    """Show new records; return the error of a process that hangs."""
    try:
        view.refresh()
    except ProcessSilent as silent:
        return silent
    return None


class _Saving:
    """A requested stop.

    Attributes:
        by: deadline after which running parts are ended, in time.monotonic's seconds.
    """

    def __init__(self, controller: Part, by: float) -> None:
        self.by = by
        self._controller, self._told, self._next = controller, False, 0.0

    def over(self, now: float) -> bool:
        """Ask the controller once to stop; true after the deadline."""
        # A second request would make the controller end at once. Retry only until SLURM knows its step.
        if not self._told and now > self._next and self._controller.status is None:
            self._next = now + _ASK_AGAIN_S
            try:
                self._told = parts.ask_to_stop([self._controller])
            except AsyncmoeError as error:
                print(f"retrying the stop request to the controller in {_ASK_AGAIN_S:.0f} s: {error}", flush=True)
        return now > self.by


def _bad(part: Part, stop: Stop) -> bool:
    """True if a part failed. A controller that was asked to stop before it installed its handler did not fail."""
    return part.failed and not (stop.save and part.step.name == steps.CONTROLLER and part.status == _INTERRUPTED)


def _time_to_save(where: Allocation) -> float:
    try:
        left = control.seconds_left(where.name)
    except AsyncmoeError as error:
        print(f"the time limit is taken for {_SIGNALLED_S:.0f} s away: {error}", flush=True)
        left = _SIGNALLED_S
    return _UNLIMITED_S if left is None else min(max(left - _KEPT_S, _POLL_S), _UNLIMITED_S)
