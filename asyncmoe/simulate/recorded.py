"""What a run's own records say about a plant: lengths, turns and tools of the groups it kept, and the seconds of its steps.

Kept groups (`telemetry.samples`) are chosen by their number alone, so their lengths are those of all. The time of an engine's step cannot
be told from the records, for a response also waits; measure `engines.step_s` and `engines.step_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, pstdev
from typing import Any

from asyncmoe.config.moved import of_run
from asyncmoe.config.schema import Config
from asyncmoe.errors import DataError
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.samples.index import lines
from asyncmoe.telemetry.samples.records import FOLDER, ROLLOUT_SAMPLES, SampledGroup, SampledMember
from asyncmoe.telemetry.schema import METRICS, Step

Episode = tuple[tuple[int, ...], tuple[float, ...]]
"""As `asyncmoe.simulate.workload.Episode`, which imports this file."""


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run, as far as a simulation needs them.

    Attributes:
        path: directory of the run.
        groups: the kept groups' episodes. A trajectory of several agents or paths counts as one of its own.
        keys: values of a plant's keys.
    """

    path: Path
    groups: tuple[tuple[Episode, ...], ...]
    keys: dict[str, Any]


def read_recorded(run_dir: Path) -> RecordedRun:
    """Read a run's directory; the run may still be running.

    Raises:
        UserError: it is no run's.
        ConfigError: its configuration is none.
        DataError: it kept no groups yet, or has records that are malformed.
    """
    config = of_run(run_dir)
    steps = [step for step in read_steps(run_dir / METRICS) if step.phase == "rl"]
    found = list(_groups(run_dir / FOLDER / ROLLOUT_SAMPLES))
    members = [member for group in found for member in group]
    groups = tuple(tuple(map(_episode, group)) for group in found)
    if not groups:
        expected = "one that has trained, and keeps groups (telemetry.samples.groups)"
        raise DataError(str(run_dir), got="a run without kept groups", expected=expected)
    keys = {**_sizes(config), **_step_seconds(steps), **_scoring(members)}
    return RecordedRun(run_dir, groups, keys)


def _groups(path: Path) -> Iterator[list[SampledMember]]:
    """The whole trajectories of each group that has any."""
    for record, _ in lines(path):
        if isinstance(record, SampledGroup):
            whole = [one for one in record.members if one.digest is not None and _sampled(one)]
            if whole:
                yield whole


def _sampled(member: SampledMember) -> list[int]:
    return [count for role, count in member.roles if role == "response" and count]


def _episode(member: SampledMember) -> Episode:
    """Turns of a trajectory; the seconds of its tool calls are divided evenly over the gaps between them."""
    turns = tuple(_sampled(member))
    gaps = len(turns) - 1
    return turns, (sum(call.seconds for call in member.calls) / gaps,) * gaps if gaps else ()


# ---------------------------------------------------------------- keys of a plant


def _sizes(config: Config) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "groups_per_step": config.rollout.groups_per_step,
        "group_size": config.rollout.group_size,
        "max_staleness": config.queue.staleness.max_staleness,
        "max_concurrent": config.rollout.max_concurrent,
        "engines.count": config.engines.count,
        "engines.gpus": config.engines.tp,
        "engines.max_running": config.engines.max_running,
        "trainer.gpus": config.trainer.ranks,
        "scoring.concurrency": config.scoring.concurrency,
    }
    return {key: value for key, value in keys.items() if value is not None}


def _step_seconds(steps: Sequence[Step]) -> dict[str, Any]:
    train = _known(step.train_seconds for step in steps)
    sync = _known(step.sync_seconds for step in steps)
    pauses = _known(step.pause_ms for step in steps)
    pause = median(pauses) / 1000 if pauses else 0.0
    keys: dict[str, Any] = {"trainer.step_s": median(train)} if train and median(train) else {}
    return keys | ({"sync.seconds": max(0.0, median(sync) - pause), "sync.pause_s": pause} if sync else {})


def _scoring(members: Sequence[SampledMember]) -> dict[str, Any]:
    seconds = [member.seconds["score"] for member in members if "score" in member.seconds]
    if not seconds:
        return {}
    logs = [math.log(value) for value in seconds if value > 0]  # the records round what takes less than 0.05 ms to 0
    return {"scoring.seconds": median(seconds), "scoring.sigma": min(5.0, pstdev(logs)) if logs else 0.0}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
