"""Computes the state in which a run's queue begins, from the run's records and the step of the loaded checkpoint. Pure.

Let k be the step of the checkpoint, at least the step at which reinforcement learning began. Leases of steps before k are over: the
checkpoint's weights include those that were trained, and those that the trainer skipped stay skipped. Leases of steps from k on are
replayed: the same groups, weights and order; skipped ones are no longer skipped, because the trainer decides anew. Queued groups stay
queued, in their order of arrival. Groups that were begun, or were to start again, start before any new group. Dropped and rejected groups
stay so, whatever the checkpoint: a group ends once.

The ledger continues. Started episodes that are in none of these states were running: they count as requeued, with reason "restart".

If only the trainer is lost, and restarts while the queue lives on, just the leases change (`reopen`): those from k on are replayed by the
same rule, and the episodes that they had trained or skipped count as leased again.

Damage. A group whose payload is lost starts again. A lease from k on that cannot be replayed, because its record or a payload is lost, ends
the replays: the groups of later leases are queued again. If no record says which groups an older step had, every group that it may have had
is dropped, so that none is trained twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from asyncmoe.errors import DataError, InvariantBroken
from asyncmoe.log.log import Place
from asyncmoe.queue import records
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Ledger
from asyncmoe.queue.records import Start

RESTART = "restart"
"""Reason for episodes that were running when the run stopped."""
DAMAGED = "damaged"
"""Reason for groups that may have been trained by a step whose record is lost."""


@dataclass(frozen=True)
class RecordedGroup:
    """A group that has not ended. Without a place it is under way or waits to start; with a place it is queued, or leased if it has a step.

    Attributes:
        number, attempt, failures: as in `Start`.
        since: position of the oldest record about it.
        order: sort key in the order of starts, ascending; for a finished group, of arrivals.
        step: step of its lease. The group is trained or skipped once the step is committed.
    """

    number: int
    attempt: int = 0
    failures: int = 0
    since: int = 0
    order: int = 0
    episodes: int = 0
    place: Place | None = None
    step: int | None = None


@dataclass(frozen=True)
class RecordedLease:
    """A leased batch.

    Attributes:
        numbers: numbers of its groups.
        terms: None if only its commit is known.
        ended: None: not committed; empty: its step was trained; else why it was skipped.
    """

    position: int
    numbers: tuple[int, ...]
    terms: records.StepLeased | None
    ended: str | None = None


@dataclass(frozen=True)
class RecordedStep:
    """Where the batch of a step lies: position of its lease, and for each writer the place of its oldest payload."""

    position: int
    oldest: tuple[Place, ...]


@dataclass
class LogState:
    """The state that a log describes. `apply` is the fold's step.

    Attributes:
        groups: by number, without those that ended or are forgotten.
        leases: by step.
        first, next, history, since: as in `RunStands`; `first` is None until a trainer has joined.
        accounts: the queue's accounts at the newest change, if any.
        damaged: whether some records are lost.
        recorded: the steps of the recorded window (`asyncmoe.checkpoints.retention`), on which no resume depends.
    """

    groups: dict[int, RecordedGroup] = field(default_factory=dict)
    leases: dict[int, RecordedLease] = field(default_factory=dict)
    first: int | None = None
    next: int = 0
    history: int = 0
    since: int = 0
    accounts: Accounts | None = None
    damaged: bool = False
    recorded: dict[int, RecordedStep] = field(default_factory=dict)

    def apply(self, position: int, change: records.Change) -> None:
        """Apply a record."""
        match change:
            case Start(number, attempt, failures):
                known = self.groups.get(number)
                order = known.order if known is not None and (known.place, known.attempt) == (None, attempt) else position
                self.groups[number] = RecordedGroup(number, attempt, failures, order, order)
                self.next = max(self.next, number + 1)
            case records.GroupFinished(number, arrival, attempt, episodes, place):
                self.groups[number] = RecordedGroup(number, attempt, 0, position, arrival, episodes, place)
            case records.GroupEnded(number):
                self.groups.pop(number, None)
            case records.RunStands(first, after, history, since, again):
                self.first, self.next, self.history, self.since = first, max(self.next, after), history, since
                self.forget(first)
                # Records of older groups and leases stay for the recorded window; if the record of such a group's end is damaged, it must
                # not seem to be queued.
                self.groups = {number: one for number, one in self.groups.items() if one.since >= since}
                for step in [] if again is None else [step for step in self.leases if step >= again]:
                    self.leases[step] = replace(self.leases[step], ended=None)
            case _:
                self._apply_to_lease(position, change)

    def _apply_to_lease(self, position: int, change: records.StepLeased | records.StepCommitted | records.StepReleased) -> None:
        match change:
            case records.StepLeased(step, history=history, groups=groups):
                self.leases[step] = RecordedLease(position, tuple(one.number for one in groups), change)
                self.recorded[step] = RecordedStep(position, _oldest(one.place for one in groups))
                self.history = max(self.history, history)
                for one in groups:
                    self.groups[one.number] = RecordedGroup(one.number, 0, 0, position, one.order, one.episodes, one.place, step)
            case records.StepCommitted(step, skipped, numbers):
                self.leases[step] = replace(self.leases.get(step) or RecordedLease(position, numbers, None), ended=skipped)
            case records.StepReleased(step):
                self.leases.pop(step, None)
                self.recorded.pop(step, None)
                self.groups |= {number: replace(one, step=None) for number, one in self.groups.items() if one.step == step}

    def forget(self, first: int) -> None:
        """Forget the leases of steps before `first`, and their groups; the recorded window keeps its own list."""
        self.leases = {step: lease for step, lease in self.leases.items() if step >= first}
        self.groups = {number: one for number, one in self.groups.items() if one.step is None or one.step >= first}

    @property
    def under_way(self) -> dict[int, int]:
        """Attempts of the groups that were begun or are to start again, by group number."""
        return {number: group.attempt for number, group in self.groups.items() if group.place is None}

    def needed(self, end: int) -> int:
        """Return the position of the oldest record that a resume needs, or `end` if none is."""
        return min((*(one.since for one in self.groups.values()), *(one.position for one in self.leases.values())), default=end)

    @property
    def payloads(self) -> dict[int, int]:
        """Position of the oldest payload still needed, by writer."""
        places = [one.place for one in self.groups.values() if one.place is not None]
        oldest = _oldest((*places, *(place for one in self.recorded.values() for place in one.oldest)))
        return {place.writer: place.position for place in oldest}

    def recorded_since(self, step: int) -> int:
        """Return the first step from which every step before `step` is recorded."""
        while step - 1 in self.recorded:
            step -= 1
        return step


def _oldest(places: Iterable[Place]) -> tuple[Place, ...]:
    """Return the place of the lowest position for each writer."""
    return tuple({place.writer: place for place in sorted(places, key=lambda place: place.position, reverse=True)}.values())


def fold(entries: Iterable[tuple[int, records.LogEntry]]) -> LogState:
    """Return the state that records describe; the oldest records may already be deleted."""
    state, oldest = LogState(), None
    for position, entry in entries:
        oldest = position if oldest is None else oldest
        state.apply(position, entry.change)
        state.accounts = entry.accounts or state.accounts
    state.damaged = oldest is not None and oldest > state.since  # the beginning is lost
    return state


@dataclass(frozen=True)
class Recovered:
    """The initial state of a queue.

    Attributes:
        accounts: the queue's accounts, with no episode running.
        replays: leases to grant again, by step.
        queued: groups to queue, in order of arrival.
        starts: groups to start before any new one, in order.
        arrivals: number of the newest arrival.
        history: number of restarts that replayed and so made other weights, including this one.
        first: step from which on all leases are known.
        repairs: changes to record, so that damage is repaired once.
    """

    accounts: Accounts
    replays: Mapping[int, records.StepLeased] = field(default_factory=dict)
    queued: tuple[RecordedGroup, ...] = ()
    starts: tuple[Start, ...] = ()
    arrivals: int = 0
    history: int = 0
    first: int = 0
    repairs: tuple[records.Change, ...] = ()


NEW = Recovered(Accounts(Ledger()))
"""No earlier process left anything."""


def recover(
    state: LogState, step: int, base: int, batch: int, name: str, lost: Collection[int] = frozenset(), *, same: bool = False
) -> Recovered:
    """Return the initial state of the queue for a trainer that has taken `step` steps.

    Args:
        base: step at which reinforcement learning began.
        batch: episodes of a step.
        name: the log's name, for messages.
        lost: groups whose payload is damaged.
        same: the trainer trains the replays with the same bits. Unless damage ends the replays, its weights belong to the same history.

    Raises:
        DataError: the log begins after the checkpoint, or ends before it.
        InvariantBroken: the records contradict each other.
    """
    reached = max(step, base)
    new = not (state.groups or state.leases)
    first = state.first if state.first is not None else reached if new else base  # if the log lacks its beginning: the earliest possible
    replays = _replays(state, first, reached, name, lost)
    unknown = max(set(range(first, reached)) - state.leases.keys(), default=None)
    # Groups that were finished by then may have been trained by a step whose record is lost.
    then = 0 if unknown is None else min((lease.position for at, lease in state.leases.items() if at > unknown), default=float("inf"))
    taken = {number for at, lease in state.leases.items() if at < reached or at in replays for number in lease.numbers}
    left = sorted((group for group in state.groups.values() if group.number not in taken), key=lambda group: group.order)
    kept, dropped = [one for one in left if one.since >= then], [one for one in left if one.since < then]
    queued = tuple(one for one in kept if one.place is not None and one.number not in lost)
    again = [Start(one.number, one.attempt + 1) for one in kept if one.number in lost]
    pending = [Start(one.number, one.attempt, one.failures) for one in kept if one.place is None]
    leased, over = sum(lease.count for lease in replays.values()), (reached - base) * batch
    waiting, given_up = sum(one.episodes for one in queued), sum(one.episodes for one in dropped)
    accounts = _accounts(state, reached, over, leased, waiting, given_up, "" if state.damaged or lost else name)
    repairs: tuple[records.Change, ...] = (
        *(records.GroupEnded(one.number) for one in dropped),
        *again,
        *(records.StepReleased(at) for at in sorted(state.leases) if at >= reached and at not in replays),
    )
    arrivals = max((group.order for group in state.groups.values() if group.place is not None), default=0)
    exact = same and not (state.damaged or lost)
    history, known = state.history + (bool(replays) and not exact), first if unknown is None else unknown + 1
    return Recovered(accounts, replays, queued, (*again, *pending), arrivals, history, known, repairs)


def _replays(state: LogState, first: int, reached: int, name: str, lost: Collection[int]) -> dict[int, records.StepLeased]:
    """Return the leases of steps from `reached` on, by step; all are known from `first` on. Arguments and errors as in `recover`."""
    end = max((step + 1 for step in state.leases), default=first)
    end = max(end, reached) if state.damaged else end  # records of the newest steps may be lost
    if not state.damaged and (gaps := set(range(first, end)) - state.leases.keys()):
        raise InvariantBroken(f"{name}: got no lease of steps {sorted(gaps)[:5]}, expected one for every step from {first} on")
    if not first <= reached <= end:
        hint = f"delete {name}: queued and unfinished episodes are then sampled again; or restore the checkpoint that belongs to it"
        raise DataError(name, got=f"a log of steps {first} to {end}", expected=f"step {reached}, where the checkpoint is", hint=hint)
    replays: dict[int, records.StepLeased] = {}
    for step in range(reached, end):
        lease = state.leases.get(step)
        if lease is None or lease.terms is None or any(number in lost for number in lease.numbers):
            break
        if not state.damaged and {one.number for one in state.groups.values() if one.step == step} != {*lease.numbers}:
            raise InvariantBroken(f"{name}: not all groups of the lease of step {step} are recorded as leased: {lease.numbers}")
        replays[step] = lease.terms
    return replays


def _accounts(state: LogState, reached: int, over: int, leased: int, queued: int, lost: int, exact: str) -> Accounts:
    """Return the ledger with which a queue begins: the recorded one with the current leased and queued counts; other episodes were running.

    Args:
        over: episodes of steps that are over; lost: episodes of groups given up because of damage.
        exact: name of a log that has lost nothing; empty: adjust the ledger until it adds up.
    """
    before = state.accounts or Accounts(Ledger(started=over, trained=over))
    old, skipped = before.ledger, Counter(before.skipped)
    for step, lease in state.leases.items():
        if step >= reached and lease.ended and lease.terms is not None:  # the trainer decides anew
            skipped[lease.ended] -= lease.terms.count
    ended = old.dropped + old.rejected + old.requeued
    running = old.started - ended - lost - queued - leased - over
    if running < 0 or skipped.total() > over or min(skipped.values(), default=0) < 0:
        if exact:
            counted = f"{over} episodes of ended steps, {leased} leased, {queued} queued, {dict(skipped)} skipped"
            raise InvariantBroken(f"{exact}: got {counted}, expected the counts of {old}")
        skipped, running = Counter(), max(running, 0)
    depth, skips = queued + lost + running, skipped.total()
    started, trained = ended + depth + leased + over, over - skips
    ledger = replace(old, started=started, running=0, queued=depth, leased=leased, trained=trained, skipped=skips)
    accounts = replace(before, ledger=ledger, skipped=dict(+skipped))
    accounts = accounts.end(lost, "queued", "dropped", DAMAGED) if lost else accounts
    return accounts.end(running, "queued", "requeued", RESTART) if running else accounts
