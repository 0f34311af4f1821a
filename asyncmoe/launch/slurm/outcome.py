"""The outcome of a job whose steps have ended: a report, a requeue, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncmoe import checkpoints, storage
from asyncmoe.config import Config
from asyncmoe.errors import RECURRING, AsyncmoeError, Interrupted
from asyncmoe.launch import watch
from asyncmoe.launch.slurm import control
from asyncmoe.launch.slurm.command import Stop
from asyncmoe.launch.slurm.steps import Allocation

_LOST = "slurm-lost.json"
"""File of the run with a job's name and the number of its requeues after lost processes, kept between starts of the job."""


def conclude(where: Allocation, config: Config, before: Path | None, cause: AsyncmoeError | None, stop: Stop) -> None:
    """Report a finished run; requeue an unfinished one if that can help.

    Args:
        before: the newest checkpoint when the job started.
        cause: root cause of a failure, if there was one.

    Raises:
        AsyncmoeError: the run ended unfinished and is not requeued.
    """
    # A cancelled job is signalled after its steps, and must not be requeued.
    if stop.now or (cause is not None and not _says(control.running, where, otherwise=True)):
        raise told_to_end(where)
    newest = checkpoints.newest(config.run.dir)
    finished = newest is not None and bool(checkpoints.facts(newest)["step"] >= config.warmup.steps + config.run.steps)
    recurs = cause is not None and cause.exit_code in RECURRING
    # Steps that SLURM warns of a preemption save and end by themselves, which is not a loss that `cluster.requeues` counts.
    warned = cause is None and not stop.save
    if not finished and not recurs and (warned or _says(control.preempted, where, otherwise=False)):
        _say(f"job {where.name} is requeued with {_at(newest)}: SLURM warned its steps of their end, as before a preemption")
        control.requeue(where.name)
    elif cause is not None:
        _lost(where, config, cause)
    elif stop.save and not finished:
        _stopped(where, config, before, newest, stop)
    else:
        watch.conclude(config.run.dir)
        print("finished", *watch.written(config), sep="\n", flush=True)


def _stopped(where: Allocation, config: Config, before: Path | None, newest: Path | None, stop: Stop) -> None:
    at = _at(newest)
    if not stop.requeue:
        raise Interrupted(watch.saved("stopped", config))
    if newest == before:
        hint = "raise sbatch --time, or lower SECONDS, the time before that limit, in --signal=B:USR1@SECONDS"
        raise AsyncmoeError(f"job {where.name} made no step before its time limit (it has {at}); a requeue would repeat this; {hint}")
    _say(f"job {where.name} is requeued with {at}: its time limit is near")
    control.requeue(where.name)


def _at(newest: Path | None) -> str:
    return "no checkpoint" if newest is None else newest.name


def _says(ask: Callable[[str], bool], where: Allocation, otherwise: bool) -> bool:
    try:
        return ask(where.name)
    except AsyncmoeError as error:
        _say(f"assuming that the job is {'' if otherwise else 'not '}{ask.__name__}: {error}")
        return otherwise


def told_to_end(where: Allocation) -> AsyncmoeError:
    """Return the error of a cancelled job, or of one that was preempted without time to save."""
    how = "preempted" if _says(control.preempted, where, otherwise=False) else "cancelled"
    return AsyncmoeError(f"job {where.name} was {how}; progress since the last checkpoint is lost")


def _lost(where: Allocation, config: Config, cause: AsyncmoeError) -> None:
    """Requeue the job, or raise the cause of its failure.

    Raises:
        AsyncmoeError: the job is not requeued; `exit_code` is that of the cause.
    """
    path, limit = config.run.dir / _LOST, config.cluster.requeues
    count = lost_before(path, where.name)
    if cause.exit_code not in RECURRING and count < limit:
        with storage.writing("count of the job's losses", path):
            path.write_bytes(msgspec.json.encode((where.name, count + 1)))
        _say(f"{cause}; job {where.name} is requeued, {count + 1} of at most {limit} times (cluster.requeues)")
        control.requeue(where.name)
        return
    if cause.exit_code == AsyncmoeError.exit_code and limit:
        raise AsyncmoeError(f"{cause}; the job was lost {count + 1} times, cluster.requeues allows {limit}")
    raise cause


def lost_before(path: Path, job: str) -> int:
    """Return how often this job lost a process so far; a count left by another job is ignored."""
    try:
        kept, count = msgspec.json.decode(path.read_bytes(), type=tuple[str, int])
    except (FileNotFoundError, ValueError):
        return 0
    return count if kept == job else 0


def _say(text: str) -> None:
    print(text, flush=True)
