"""Finds the samples of a run and joins their halves, without holding their tokens in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from asyncmoe.errors import DataError, an
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.samples.records import FOLDER, FORMAT, ROLLOUT_SAMPLES, TRAINER_SAMPLES, Begin, Full, SampledGroup, Stale, Trained
from asyncmoe.telemetry.schema import METRICS

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

    time: float
    group: int
    fate: Literal["queued", "dropped", "rejected"]
    version: int
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
    time: float
    outcome: Outcome
    reason: str
    version: int
    place: LineSpan
    members: int
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
    folder, notes = run_dir / FOLDER, _Notes()
    trained, undone = _trained(folder / TRAINER_SAMPLES, notes)
    entries = _groups(folder / ROLLOUT_SAMPLES, trained, undone, notes)
    if not entries:
        raise _none(run_dir, notes.said)
    if not (folder / TRAINER_SAMPLES).is_file():
        notes.add(f"{FOLDER}/{TRAINER_SAMPLES} is missing: nothing is known of what the trainer made of the tokens")
    elif not any(entry.trained for entry in entries):
        notes.add(f"{FOLDER}/{TRAINER_SAMPLES} has nothing about these groups yet")
    return Index(run_dir, entries, notes.said)


def load(found: Index, entry: Entry) -> GroupSample:
    """Read the records of a group.

    Raises:
        DataError: a record has changed since the index was made, or is malformed.
    """
    folder = found.run_dir / FOLDER
    group = _record(folder / ROLLOUT_SAMPLES, entry.place, SampledGroup)
    trained = {key: _record(folder / TRAINER_SAMPLES, place, Trained) for key, place in entry.trained.items()}
    return GroupSample(entry, group, trained)


class _Notes:
    """Collects sentences; says each once."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def add(self, sentence: str) -> None:
        if sentence not in self.said:
            self.said.append(sentence)


_NOTES = 3
"""Notes that an error repeats."""
_Key = tuple[str, int]
_Steps = dict[_Key, tuple[int, LineSpan]]


def _trained(path: Path, notes: _Notes) -> tuple[_Steps, set[_Key]]:
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


def _groups(path: Path, trained: _Steps, undone: set[_Key], notes: _Notes) -> list[Entry]:
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
    versions = [version for member in head.members for version, _ in member.versions]
    outcome, reason = head.fate, head.reason
    entry = Entry(
        group=head.group,
        attempt=head.attempt,
        time=head.time,
        outcome=outcome,
        reason=reason,
        version=head.version,
        place=place,
        members=len(head.members),
        reward=sum(rewards) / len(rewards) if rewards else None,
        versions=frozenset(versions),
    )
    if steps:
        step = max(step for step, _ in steps.values())
        return replace(entry, outcome="trained", step=step, trained={key: line for (key, _), (_, line) in steps.items()})
    if undone.intersection(keys):
        return replace(entry, outcome="lost", reason="its training was undone: the run resumed from an earlier step")
    return entry


def _heads(path: Path, notes: _Notes) -> Iterator[tuple[LineSpan, _Head]]:
    """Yield the heads of a file's records. A missing file has none; lines that cannot be read are noted and left out."""
    if not path.is_file():
        return
    decoder, begin, name, full = msgspec.json.Decoder(_Head), 0, f"{FOLDER}/{path.name}", None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place, begin = LineSpan(begin, len(line)), begin + len(line)
            if not line.endswith(b"\n"):
                notes.add(f"{name} ends within line {number}: its writer was killed, or is writing; the line is left out")
                return
            try:
                head: _Head = decoder.decode(line)
            except msgspec.DecodeError as error:  # also of a line that is no UTF-8
                notes.add(f"{name} line {number} is no record ({str(error)[:120]}); it is left out")
                continue
            if isinstance(head, Begin) and head.format > FORMAT:
                raise DataError(
                    str(path), got=f"samples of format {head.format}", expected=f"at most {FORMAT}", hint="read them with a newer asyncmoe"
                )
            full = head if isinstance(head, Full) else None
            yield place, head
    if full is not None:
        notes.add(f"the samples stopped when {FOLDER} reached {full.bound} bytes")


def _record(path: Path, place: LineSpan, kind: type[Any]) -> Any:
    with path.open("rb") as file:
        file.seek(place.begin)
        line = file.read(place.size)
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} byte {place.begin}", got=str(error)[:200], expected=f"{an(kind.__name__)} record") from error


def _none(run_dir: Path, notes: Sequence[str]) -> DataError:
    """Return why a directory has no samples. `notes`: what was found while they were read."""
    what, expected = f"samples of {run_dir}", "the directory of a run (run.dir) that kept some"
    config = run_dir / "config.yaml"
    if not config.is_file():
        got = "a directory without config.yaml" if run_dir.is_dir() else "a file" if run_dir.exists() else "no such directory"
        above = run_dir.parent if (run_dir.parent / config.name).is_file() else None
        return DataError(what, got=got, expected=expected, hint=None if above is None else f"did you mean {above}?")
    try:
        values = yaml.safe_load(config.read_text())
        section = values.get("telemetry", {}).get("samples")
    except (yaml.YAMLError, OSError, UnicodeDecodeError, AttributeError) as error:
        return DataError(what, got=f"a config.yaml that cannot be read ({type(error).__name__})", expected=expected)
    if section is None:
        return DataError(what, got="none: the run began with an asyncmoe that kept none", expected=expected)
    if not isinstance(section, dict) or not section.get("groups"):
        return DataError(what, got="none: telemetry.samples.groups is 0", expected=expected, hint="set it to 2, and resume or run again")
    if notes:
        return DataError(what, got=f"none that can be read: {'; '.join(notes[:_NOTES])}", expected="a finished group")
    if any(step.phase == "rl" for step in read_steps(run_dir / METRICS)):
        gone = f"steps of reinforcement learning, but no group in {FOLDER}/{ROLLOUT_SAMPLES}"
        return DataError(what, got=gone, expected="the file as the run wrote it", hint="logs/controller.log tells why")
    return DataError(what, got="none yet", expected="a finished group", hint="the first is written when reinforcement learning begins")
