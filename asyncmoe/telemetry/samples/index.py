"""Find the samples of a run and join the halves of controller and trainer. Lines are kept as bytes, a tenth of their decoded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from asyncmoe.errors import DataError
from asyncmoe.telemetry.measured import mean
from asyncmoe.telemetry.records import Tail
from asyncmoe.telemetry.samples.records import FOLDER, ROLLOUT_SAMPLES, TRAINER_SAMPLES, Begin, Full, SampledGroup, Stale, Trained

Line = Begin | SampledGroup | Stale | Trained | Full
Outcome = Literal["trained", "queued", "dropped", "requeued", "rejected", "lost"]
"""Outcome of a group. queued: the group waits, or nothing more was recorded about it. lost: its training was undone, because the run
resumed from an earlier checkpoint."""


@dataclass(frozen=True)
class GroupSample:
    """A kept group with all its records. `trained`: the trainer's records by key."""

    entry: Entry
    group: SampledGroup
    trained: Mapping[str, Trained]


@dataclass(frozen=True)
class Entry:
    """A kept group, without its tokens.

    Attributes:
        line: its undecoded record.
        trained: the trainer's records by the key of the trajectory; {} if there are none.
        step: the step that trained it; None if none did.
        reward: mean reward of the scored members; None if none was scored.
        versions: versions that sampled its tokens.
    """

    group: int
    attempt: int
    outcome: Outcome
    reason: str
    line: bytes
    reward: float | None
    versions: frozenset[int]
    step: int | None = None
    trained: Mapping[str, bytes] = field(default_factory=dict)

    def load(self) -> GroupSample:
        """Return the group with its tokens."""
        trained = {key: msgspec.json.decode(line, type=Trained) for key, line in self.trained.items()}
        return GroupSample(self, msgspec.json.decode(self.line, type=SampledGroup), trained)


def index(run_dir: Path) -> list[Entry]:
    """Read the samples of a run, finished or running, in the order in which they were written.

    Raises:
        DataError: the run has none, or a record is damaged.
    """
    folder = run_dir / FOLDER
    trained, undone = _trained(folder / TRAINER_SAMPLES)
    entries = _groups(folder / ROLLOUT_SAMPLES, trained, undone)
    if not entries:
        hint = "telemetry.samples.groups in its config.yaml says how many are kept, and logs/controller.log why none was"
        raise DataError(f"samples of {run_dir}", got="none", expected="a finished group of reinforcement learning", hint=hint)
    return entries


_Key = tuple[str, int]
_Steps = dict[_Key, tuple[int, bytes]]


def _trained(path: Path) -> tuple[_Steps, set[_Key]]:
    """Return step and line of each trained trajectory, by key and digest, and the trajectories whose training was undone."""
    found: _Steps = {}
    undone: set[_Key] = set()
    for record, line in lines(path):
        if isinstance(record, Begin):
            undone |= {key for key, (step, _) in found.items() if step > record.step}
            found = {key: value for key, value in found.items() if key not in undone}
        elif isinstance(record, Trained):
            found[record.key, record.digest] = (record.step, line)
            undone.discard((record.key, record.digest))
    return found, undone


def _groups(path: Path, trained: _Steps, undone: set[_Key]) -> list[Entry]:
    entries: list[Entry] = []
    newest: dict[tuple[int, int], int] = {}
    for record, line in lines(path):
        if isinstance(record, SampledGroup):
            newest[record.group, record.attempt] = len(entries)
            entries.append(_entry(record, line, trained, undone))
        elif isinstance(record, Stale) and (at := newest.get((record.group, record.attempt))) is not None:
            entries[at] = replace(entries[at], outcome=record.fate, reason=record.reason)
    return entries


def _entry(group: SampledGroup, line: bytes, trained: _Steps, undone: set[_Key]) -> Entry:
    keys = [(member.key, member.digest) for member in group.members if member.digest is not None]
    steps = {key: trained[key] for key in keys if key in trained}
    return Entry(
        group=group.group,
        attempt=group.attempt,
        outcome="trained" if steps else "lost" if undone.intersection(keys) else group.fate,
        reason=group.reason,
        line=line,
        reward=mean(member.reward for member in group.members),
        versions=frozenset(version for member in group.members for version, _ in member.versions),
        step=max((step for step, _ in steps.values()), default=None),
        trained={key: line for (key, _), (_, line) in steps.items()},
    )


def lines(path: Path) -> Iterator[tuple[Line, bytes]]:
    """Yield the records of a file, with their lines. A missing file has none; a line that is still being written is skipped.

    Raises:
        DataError: a line is not a record.
    """
    decoder = msgspec.json.Decoder[Line](Line)
    for where, line in Tail(path).lines():
        try:
            yield decoder.decode(line), line
        except ValueError as error:  # raised also for a line that is not UTF-8
            raise DataError(where, got=str(error)[:200], expected="a record of samples") from error
