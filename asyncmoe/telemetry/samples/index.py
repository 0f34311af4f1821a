"""Finds the samples of a run and joins their halves, without holding their tokens in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from asyncmoe.errors import DataError, an
from asyncmoe.telemetry.samples.records import FOLDER, FORMAT, ROLLOUT_SAMPLES, TRAINER_SAMPLES, Begin, Full, SampledGroup, Stale, Trained

Outcome = Literal["trained", "queued", "dropped", "requeued", "rejected", "lost"]
"""What became of a group. queued: it waits, or nothing more was written of it. lost: the run was started again before it was trained, or
its training was undone, because the run resumed from an earlier checkpoint."""


class _MemberHead(msgspec.Struct):
    key: str
    digest: int | None = None
    reward: float | None = None
    versions: Sequence[tuple[int, int]] = ()


class _GroupHead(msgspec.Struct, tag_field="record", tag="group"):
    """The part of a `SampledGroup` that an index needs."""

    group: int
    fate: Literal["queued", "dropped", "rejected"]
    attempt: int = 0
    reason: str = ""
    members: Sequence[_MemberHead] = ()


class _TrainedHead(msgspec.Struct, tag_field="record", tag="trained"):
    step: int
    key: str
    digest: int


_Head = _GroupHead | _TrainedHead | Begin | Stale | Full


@dataclass(frozen=True)
class LineSpan:
    """A line of a file: its first byte and its length."""

    begin: int
    size: int


@dataclass(frozen=True)
class Entry:
    """A kept group, without its tokens.

    Attributes:
        place: its line in samples/rollout.jsonl.
        trained: the trainer's lines by the key of the trajectory; {} if there are none.
        step: the step that trained it; None if none did.
        reward: mean reward of the scored members; None if none was scored.
        versions: versions that sampled its tokens.
    """

    group: int
    attempt: int
    outcome: Outcome
    reason: str
    place: LineSpan
    reward: float | None
    versions: frozenset[int]
    step: int | None = None
    trained: Mapping[str, LineSpan] = field(default_factory=dict)


@dataclass(frozen=True)
class Index:
    """The samples of a run.

    Attributes:
        entries: in the order in which they were written.
        notes: what a reader should know: a torn line, a missing half, a folder that was full. A sentence each.
    """

    run_dir: Path
    entries: Sequence[Entry]
    notes: Sequence[str]

    @property
    def steps(self) -> list[int]:
        """The steps that trained kept groups, ascending."""
        return sorted({entry.step for entry in self.entries if entry.step is not None})


@dataclass(frozen=True)
class GroupSample:
    """A kept group with all its records; `trained` by key."""

    entry: Entry
    group: SampledGroup
    trained: Mapping[str, Trained]


def index(run_dir: Path) -> Index:
    """Read the samples of a run, finished or running.

    Raises:
        DataError: the run has none; says why, as far as its configuration tells.
    """
    folder, notes = run_dir / FOLDER, list[str]()
    trained, undone = _trained(folder / TRAINER_SAMPLES, notes)
    entries = _groups(folder / ROLLOUT_SAMPLES, trained, undone, notes)
    if not entries:
        raise _none(run_dir, notes)
    if not (folder / TRAINER_SAMPLES).is_file():
        notes.append(f"{FOLDER}/{TRAINER_SAMPLES} is missing: nothing is known of what the trainer made of the tokens")
    elif not any(entry.trained for entry in entries):
        notes.append(f"{FOLDER}/{TRAINER_SAMPLES} has nothing about these groups yet")
    return Index(run_dir, entries, notes)


def load(found: Index, entry: Entry) -> GroupSample:
    """Read the records of a group.

    Raises:
        DataError: a record has changed since the index was made, or is malformed.
    """
    folder = found.run_dir / FOLDER
    group = _record(folder / ROLLOUT_SAMPLES, entry.place, SampledGroup)
    trained = {key: _record(folder / TRAINER_SAMPLES, place, Trained) for key, place in entry.trained.items()}
    return GroupSample(entry, group, trained)


_NOTES = 3
"""Notes that an error repeats."""
_Key = tuple[str, int]
_Steps = dict[_Key, tuple[int, LineSpan]]


def _trained(path: Path, notes: list[str]) -> tuple[_Steps, set[_Key]]:
    """Return step and line of each trained trajectory, by key and digest, and the trajectories whose training was undone."""
    found: _Steps = {}
    undone: set[_Key] = set()
    for place, head in _heads(path, notes):
        if isinstance(head, Begin):
            again = {key for key, (step, _) in found.items() if step > head.step}
            undone |= again
            found = {key: value for key, value in found.items() if key not in again}
        elif isinstance(head, _TrainedHead):
            found[head.key, head.digest] = (head.step, place)
            undone.discard((head.key, head.digest))
    return found, undone


def _groups(path: Path, trained: _Steps, undone: set[_Key], notes: list[str]) -> list[Entry]:
    entries: list[Entry] = []
    newest: dict[tuple[int, int], int] = {}
    for place, head in _heads(path, notes):
        if isinstance(head, _GroupHead):
            newest[head.group, head.attempt] = len(entries)
            entries.append(_entry(head, place, trained, undone))
        elif isinstance(head, Stale) and (at := newest.get((head.group, head.attempt))) is not None:
            entries[at] = replace(entries[at], outcome=head.fate, reason=head.reason)
    return entries


def _entry(head: _GroupHead, place: LineSpan, trained: _Steps, undone: set[_Key]) -> Entry:
    keys = [(member.key, member.digest) for member in head.members if member.digest is not None]
    steps = {key: trained[key] for key in keys if key in trained}
    rewards = [member.reward for member in head.members if member.reward is not None]
    entry = Entry(
        group=head.group,
        attempt=head.attempt,
        outcome=head.fate,
        reason=head.reason,
        place=place,
        reward=fmean(rewards) if rewards else None,
        versions=frozenset(version for member in head.members for version, _ in member.versions),
    )
    if steps:
        step = max(step for step, _ in steps.values())
        return replace(entry, outcome="trained", step=step, trained={key: line for (key, _), (_, line) in steps.items()})
    if undone.intersection(keys):
        return replace(entry, outcome="lost", reason="its training was undone: the run resumed from an earlier step")
    return entry


def _heads(path: Path, notes: list[str]) -> Iterator[tuple[LineSpan, _Head]]:
    """Yield the heads of a file's records. A missing file has none; lines that cannot be read are noted and left out."""
    if not path.is_file():
        return
    decoder, begin, name, full = msgspec.json.Decoder(_Head), 0, f"{FOLDER}/{path.name}", None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place, begin = LineSpan(begin, len(line)), begin + len(line)
            if not line.endswith(b"\n"):
                notes.append(f"{name} ends within line {number}: its writer was killed, or is writing; the line is left out")
                return
            try:
                head: _Head = decoder.decode(line)
            except ValueError as error:  # also of a line that is no UTF-8
                notes.append(f"{name} line {number} is no record ({str(error)[:120]}); it is left out")
                continue
            if isinstance(head, Begin) and head.format > FORMAT:
                raise DataError(
                    str(path), got=f"samples of format {head.format}", expected=f"at most {FORMAT}", hint="read them with a newer asyncmoe"
                )
            full = head if isinstance(head, Full) else None
            yield place, head
    if full is not None:
        notes.append(f"the samples stopped when {FOLDER} reached {full.bound} bytes")


def _record(path: Path, place: LineSpan, kind: type[Any]) -> Any:
    with path.open("rb") as file:
        file.seek(place.begin)
        line = file.read(place.size)
    try:
        return msgspec.json.decode(line, type=kind)
    except ValueError as error:
        raise DataError(f"{path} byte {place.begin}", got=str(error)[:200], expected=f"{an(kind.__name__)} record") from error


def _none(run_dir: Path, notes: Sequence[str]) -> DataError:
    """Return why a directory has no samples. `notes`: what was found while they were read."""
    if not (run_dir / "config.yaml").is_file():
        got, expected, hint = "no run", "the directory of a run (run.dir)", None
    elif notes:
        got, expected, hint = f"none that can be read: {'; '.join(notes[:_NOTES])}", "a finished group", None
    else:
        got, expected = "none", "a finished group of reinforcement learning"
        hint = "telemetry.samples.groups in its config.yaml says how many are kept, and logs/controller.log why none was"
    return DataError(f"samples of {run_dir}", got=got, expected=expected, hint=hint)
