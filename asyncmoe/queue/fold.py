"""From the records of a run and the step of the loaded checkpoint to the state in which its queue begins. Pure.

Let k be the step of the checkpoint, at least the step at which reinforcement learning began. Leases of steps before k are over: the
checkpoint's weights know those that were trained, and those that the trainer skipped stay skipped. Leases of steps from k on are replayed:
the same groups, weights and order; those that were skipped no longer are, because the trainer decides anew. Groups that are queued stay
queued, in their order of arrival. Groups that were begun, and those that were to start again, start before any new group. What was dropped
or rejected stays so, whatever the checkpoint: a group ends once.

The ledger goes on. Episodes that were started and are in none of these states were running: they count as requeued, "restart".

A trainer that is lost alone, and started again while the queue goes on, changes only the leases (`reopen`): those from k on are replayed by
the same rule, and what they had trained or skipped counts as leased again.

Damage. A group whose payload is lost starts again. A lease from k on that cannot be replayed, because its record or a payload is lost, ends
the replays: the groups of later leases are queued again. If nothing says which groups an older step had, every group that it may have had
is dropped: none is trained twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncmoe.errors import DataError, InvariantBroken
from asyncmoe.log.log import Place
from asyncmoe.queue import records
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Ledger
from asyncmoe.queue.records import Change
from asyncmoe.queue.start_order import Start

RESTART = "restart"
"""Reason of episodes that were running when the run stopped."""
DAMAGED = "damaged"
"""Reason of groups that may have been trained by a step whose record is lost."""


@dataclass(frozen=True)
class RecordedGroup:
    """The newest state of a group that has not ended.

    Attributes:
        state: waiting: it is to start again. A leased group is trained or skipped once its lease is committed.
        since: position of the oldest record that tells it.
        order: place in the order of starts, ascending; of a finished group, of arrivals.
        attempt, failures: as in `Start`.
        step: of its lease.
    """

    number: int
    state: Literal["begun", "waiting", "queued", "leased"]
    since: int
    order: int
    attempt: int = 0
    failures: int = 0
    episodes: int = 0
    place: Place | None = None
    step: int | None = None


@dataclass(frozen=True)
class RecordedLease:
    """A batch that was leased, and what became of it. `numbers`: of its groups; `terms`: None if only its commit is known."""

    position: int
    numbers: tuple[int, ...]
    terms: records.StepLeased | None
    committed: bool = False
    skipped: str = ""


@dataclass
class LogState:
    """All that a log tells. `apply` is the fold's step.

    Attributes:
        groups: by number; those that ended or are forgotten are not in it.
        leases: by step.
        first, next, history: as in `RunStands`; first None: no trainer has joined yet.
        accounts: the queue's at the newest change; None: none.
        damaged: some records are lost.
    """

    groups: dict[int, RecordedGroup] = field(default_factory=dict)
    leases: dict[int, RecordedLease] = field(default_factory=dict)
    first: int | None = None
    next: int = 0
    history: int = 0
    accounts: Accounts | None = None
    damaged: bool = False

    def apply(self, position: int, change: Change) -> None:
        """Note a record."""
        match change:
            case records.GroupBegun(number, attempt, failures, history):
                known = self.groups.get(number)
                since, order = (known.since, known.order) if known and known.place is None else (position, position)
                self.groups[number] = RecordedGroup(number, "begun", since, order, attempt, failures)
                self.next, self.history = max(self.next, number + 1), max(self.history, history)
            case records.GroupAgain(number, attempt, failures):
                self.groups[number] = RecordedGroup(number, "waiting", position, position, attempt, failures)
            case records.GroupFinished(number, arrival, attempt, episodes, place):
                self.groups[number] = RecordedGroup(number, "queued", position, arrival, attempt, 0, episodes, place)
            case records.GroupEnded(number):
                self.groups.pop(number, None)
            case records.RunStands(first, after, history, _, again):
                self.first, self.next, self.history = first, max(self.next, after), history
                self.forget(first)
                for step in [] if again is None else [step for step in self.leases if step >= again]:
                    self.leases[step] = replace(self.leases[step], committed=False, skipped="")
            case _:
                self._apply_to_lease(position, change)

    def _apply_to_lease(self, position: int, change: records.StepLeased | records.StepCommitted | records.StepReleased) -> None:
        match change:
            case records.StepLeased(step, history=history, groups=groups):
                self.leases[step] = RecordedLease(position, tuple(one.number for one in groups), change)
                self.history = max(self.history, history)
                for one in groups:
                    self.groups[one.number] = RecordedGroup(one.number, "leased", position, one.order, 0, 0, one.episodes, one.place, step)
            case records.StepCommitted(step, skipped, numbers):
                known = self.leases.get(step) or RecordedLease(position, numbers, None)
                self.leases[step] = replace(known, committed=True, skipped=skipped)
            case records.StepReleased(step):
                for number in self.leases.pop(step).numbers if step in self.leases else ():
                    if number in self.groups:
                        self.groups[number] = replace(self.groups[number], state="queued", step=None)

    def forget(self, first: int) -> None:
        """Forget the leases of steps before `first`, and their groups."""
        self.leases = {step: lease for step, lease in self.leases.items() if step >= first}
        self.groups = {number: one for number, one in self.groups.items() if one.step is None or one.step >= first}

    @property
    def under_way(self) -> dict[int, int]:
        """Attempts of the groups that were begun and not finished, by number."""
        return {number: group.attempt for number, group in self.groups.items() if group.state == "begun"}

    @property
    def needed(self) -> int | None:
        """Position of the oldest record that is needed; None: none is."""
        positions = (*(one.since for one in self.groups.values()), *(one.position for one in self.leases.values()))
        return min(positions, default=None)

    @property
    def payloads(self) -> dict[int, int]:
        """Position of the oldest payload that is needed, by writer."""
        found: dict[int, int] = {}
        for one in self.groups.values():
            if one.place is not None:
                found[one.place.writer] = min(found.get(one.place.writer, one.place.position), one.place.position)
        return found


def fold(entries: Iterable[tuple[int, records.LogEntry]]) -> LogState:
    """Return what records tell, the oldest of which may be forgotten."""
    state, oldest, since = LogState(), None, 0
    for position, entry in entries:
        oldest = position if oldest is None else oldest
        state.apply(position, entry.change)
        state.accounts = entry.accounts or state.accounts
        since = entry.change.since if isinstance(entry.change, records.RunStands) else since
    state.damaged = oldest is not None and oldest > since  # the beginning is gone
    return state


@dataclass(frozen=True)
class Recovered:
    """The state in which a queue begins.

    Attributes:
        accounts: none running.
        replays: leases that are answered again, by step.
        queued: groups to queue, in order of arrival.
        starts: groups to start before any new one, in order.
        next: number of the first group never begun.
        arrivals: number of the newest arrival.
        history: number of restarts that replayed, this one included.
        first: step from which on all leases are known.
        dropped: groups that damage has made doubtful.
    """

    accounts: Accounts
    replays: Mapping[int, records.StepLeased]
    queued: tuple[RecordedGroup, ...]
    starts: tuple[Start, ...]
    next: int
    arrivals: int
    history: int
    first: int
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reopened:
    """What changes in a queue that goes on when its trainer goes back to a checkpoint.

    Attributes:
        step: of the checkpoint.
        replays: leases that are answered again, by step.
        trained: episodes of these that count as trained.
        skipped: episodes of these that count as skipped, by reason.
        history: number of restarts that replayed, this one included.
    """

    step: int
    replays: Mapping[int, records.StepLeased]
    trained: int
    skipped: Mapping[str, int]
    history: int


def recover(state: LogState, step: int, base: int, batch: int, name: str, lost: Collection[int] = frozenset()) -> Recovered:
    """Return the state in which the queue of a trainer that has taken `step` steps begins.

    Args:
        base: step at which reinforcement learning began.
        batch: episodes of a step.
        name: of the log, for messages.
        lost: groups whose payload is damaged.

    Raises:
        DataError: the log begins after the checkpoint, or ends before it.
        InvariantBroken: the records contradict each other.
    """
    reached = max(step, base)
    replays, gaps = _replays(state, reached, base, name, lost), _gaps(state, reached, base)
    doubtful = min((one.position for at, one in state.leases.items() if at > max(gaps, default=at)), default=float("inf")) if gaps else 0
    over = {number for at, lease in state.leases.items() if at < reached or at in replays for number in lease.numbers}
    left = sorted((group for group in state.groups.values() if group.number not in over), key=lambda group: group.order)
    kept = [one for one in left if one.since >= doubtful]
    queued = tuple(one for one in kept if one.place is not None and one.number not in lost)
    again = [Start(one.number, one.attempt + 1) for one in kept if one.number in lost]
    pending = [Start(one.number, one.attempt, one.failures) for one in kept if one.place is None]
    dropped = [one for one in left if one.since < doubtful]
    leased, given_up = sum(lease.count for lease in replays.values()), sum(one.episodes for one in dropped)
    known = _Known((reached - base) * batch, leased, sum(one.episodes for one in queued), given_up)
    return Recovered(
        _accounts(state, reached, known, name, strict=not (state.damaged or lost)),
        replays,
        queued,
        (*again, *pending),
        state.next,
        max((group.order for group in state.groups.values() if group.place is not None), default=0),
        state.history + bool(replays),
        max(gaps, default=_first(state, reached, base) - 1) + 1,
        tuple(one.number for one in dropped),
    )


def reopen(state: LogState, step: int, base: int, name: str) -> Reopened:
    """Return what the trainer of a queue that goes on gets again, when it is started again in place and has taken `step` steps.

    Args:
        state: as it is, while nothing is leased or committed.
        base, name: as for `recover`, like the errors.
    """
    replays = _replays(state, max(step, base), base, name)
    over = [state.leases[at] for at in replays if state.leases[at].committed]
    trained = sum(lease.terms.count for lease in over if lease.terms is not None and not lease.skipped)
    return Reopened(step, replays, trained, dict(_skipped(over)), state.history + bool(replays))


def _first(state: LogState, reached: int, base: int) -> int:
    """Return the step from which on all leases are known; of a log without its beginning, the first there is."""
    new = not (state.groups or state.leases)
    return state.first if state.first is not None else reached if new else base


def _replays(state: LogState, reached: int, base: int, name: str, lost: Collection[int] = ()) -> dict[int, records.StepLeased]:
    """Return the leases of steps from `reached` on, by step. Arguments and errors as for `recover`."""
    first = _first(state, reached, base)
    end = max((step + 1 for step in state.leases), default=first)
    end = max(end, reached) if state.damaged else end  # records of the newest steps may be lost
    if not state.damaged and (gaps := set(range(first, end)) - state.leases.keys()):
        raise InvariantBroken(f"{name}: no lease of steps {sorted(gaps)[:5]}, expected all from {first} on")
    if not first <= reached <= end:
        held = f"steps {first} to {end}" if state.leases else f"step {first}"
        hint = f"delete {name}: what was queued or under way is then sampled again; or bring back the checkpoint that belongs to it"
        raise DataError(name, got=f"a log of {held}", expected=f"step {reached}, where the checkpoint is", hint=hint)
    replays: dict[int, records.StepLeased] = {}
    for step in range(reached, end):
        lease = state.leases.get(step)
        if lease is None or lease.terms is None or any(number in lost for number in lease.numbers):
            break
        for number in lease.numbers:
            group = state.groups.get(number)
            if (group is None or group.step != step) and not state.damaged:
                raise InvariantBroken(f"{name}: group {number} of the lease of step {step} is recorded as {group}")
        replays[step] = lease.terms
    return replays


def _gaps(state: LogState, reached: int, base: int) -> set[int]:
    """Return the steps before `reached` of which nothing is known any more: any group that was finished by then may have been trained."""
    return set(range(_first(state, reached, base), reached)) - state.leases.keys()


@dataclass(frozen=True)
class _Known:
    """Episodes: of steps that are over, trained or skipped; leased again; queued; given up because of damage."""

    over: int
    leased: int
    queued: int
    given_up: int


def _accounts(state: LogState, reached: int, known: _Known, name: str, *, strict: bool) -> Accounts:
    """Return the ledger with which a queue begins. If records are lost, it is made to add up; `strict`: they are not."""
    before = state.accounts or Accounts(Ledger(started=known.over, trained=known.over))
    old, skipped = before.ledger, Counter(before.skipped)
    skipped.subtract(_skipped(lease for step, lease in state.leases.items() if step >= reached))
    ended = old.dropped + known.given_up + old.rejected + old.requeued
    running = old.started - ended - known.queued - known.leased - known.over
    if running < 0 or skipped.total() > known.over or min(skipped.values(), default=0) < 0:
        if strict:
            raise InvariantBroken(f"{name}: {known}, skipped {dict(skipped)}: not what the ledger says: {old}")
        skipped, running = Counter(), max(running, 0)
    skips = +skipped
    ledger = replace(
        old,
        started=ended + known.queued + known.leased + known.over + running,
        running=0,
        spare=0,
        queued=known.queued,
        leased=known.leased,
        trained=known.over - skips.total(),
        skipped=skips.total(),
        dropped=old.dropped + known.given_up,
        requeued=old.requeued + running,
    )
    requeued, dropped = Counter(before.requeued) + Counter({RESTART: running}), Counter(before.dropped) + Counter({DAMAGED: known.given_up})
    return replace(before, ledger=ledger, dropped=dict(dropped), requeued=dict(requeued), skipped=dict(skips))


def _skipped(leases: Iterable[RecordedLease]) -> Counter[str]:
    """Return episodes that leases left untrained, by reason."""
    found: Counter[str] = Counter()
    for lease in leases:
        if lease.skipped and lease.terms is not None:
            found[lease.skipped] += lease.terms.count
    return found
