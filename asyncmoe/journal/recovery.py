"""From the recorded rows and the step of the loaded checkpoint to the state in which the queue begins. Pure.

Let k be the step of the checkpoint, at least the step at which reinforcement learning began. Leases of steps before k are over: the
checkpoint's weights know those that were trained, and those that the trainer skipped stay skipped. Leases of steps from k on are replayed:
the same groups, weights and order; those that were skipped no longer are, because the trainer decides anew. Groups that are queued stay
queued, in their order of arrival. Groups that were begun, and those that were to start again, start before any new group. What was dropped
or rejected stays so, whatever the checkpoint: a group ends once.

The ledger goes on. Episodes that were started and are in none of these states were running: they count as requeued, "restart".

A trainer that goes on while the controller is lost and started again has no checkpoint to go back to: k is then the number of steps that
are committed, and no step is trained again. The lease of step k, if there is one, is under way.

A trainer that is lost alone, and started again while the queue goes on, changes only the leases (`reopen`): those from k on are replayed by
the same rule, and what they had trained or skipped counts as leased again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncmoe.errors import DataError, InvariantBroken
from asyncmoe.journal.segment_format import Place
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Ledger
from asyncmoe.queue.start_order import Start

State = Literal["begun", "waiting", "queued", "leased", "dropped", "rejected"]
"""Of a group. waiting: it is to start again. A leased group is trained or skipped once its lease is committed."""
RESTART = "restart"
"""Reason of episodes that were running when the run stopped."""


@dataclass(frozen=True)
class RecordedGroup:
    """The newest state of a group.

    Attributes:
        order: place in the order of starts, ascending; of a queued or leased group, its arrival.
        attempt, failures: as in `Start`.
        step: of its lease; None unless leased.
        episodes: their number; 0 before it is queued.
        place: of its payload; None before it is queued.
    """

    number: int
    order: int
    state: State
    attempt: int = 0
    failures: int = 0
    step: int | None = None
    episodes: int = 0
    place: Place | None = None


@dataclass(frozen=True)
class LeasedGroup:
    """A group in a lease: its number, the factor on its weight, and the keys of its trajectories in order."""

    number: int
    weight: float
    keys: tuple[str, ...]


@dataclass(frozen=True)
class RecordedLease:
    """A batch that was leased.

    Attributes:
        count: episodes.
        version: the trainer's.
        lineage: in which it was leased first.
        committed: the step is over.
        groups: in order.
        skipped: why the trainer left it untrained; "" if it did not, or is not over.
    """

    step: int
    count: int
    version: int
    lineage: int
    committed: bool
    groups: tuple[LeasedGroup, ...]
    skipped: str = ""


@dataclass(frozen=True)
class JournalRows:
    """All that a journal knows.

    Attributes:
        groups: by number; those that ended long ago are forgotten.
        leases: by step.
        first: step from which on all leases are known; None: no trainer has joined yet.
        next: number of the first group never begun.
        lineage: number of restarts that replayed.
        accounts: the queue's at the newest change; None: none.
        trained: steps that the trainer has taken, as far as it has committed them, warm-up included; None: unknown.
    """

    groups: Mapping[int, RecordedGroup] = field(default_factory=dict)
    leases: Mapping[int, RecordedLease] = field(default_factory=dict)
    first: int | None = None
    next: int = 0
    lineage: int = 0
    accounts: Accounts | None = None
    trained: int | None = None


def under_way(recorded: JournalRows) -> dict[int, int]:
    """Return the attempts of the groups that were begun and not finished, by number."""
    return {number: group.attempt for number, group in recorded.groups.items() if group.state == "begun"}


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
        lineage: number of restarts that replayed, this one included.
    """

    accounts: Accounts
    replays: Mapping[int, RecordedLease]
    queued: tuple[RecordedGroup, ...]
    starts: tuple[Start, ...]
    next: int
    arrivals: int
    lineage: int


@dataclass(frozen=True)
class Reopened:
    """What changes in a queue that goes on when its trainer goes back to a checkpoint.

    Attributes:
        step: of the checkpoint.
        replays: leases that are answered again, by step.
        trained: episodes of these that count as trained.
        skipped: episodes of these that count as skipped, by reason.
        lineage: number of restarts that replayed, this one included.
    """

    step: int
    replays: Mapping[int, RecordedLease]
    trained: int
    skipped: Mapping[str, int]
    lineage: int


def recover(recorded: JournalRows, step: int, base: int, batch: int, name: str, *, goes_on: bool = False) -> Recovered:
    """Return the state in which the queue of a trainer that has taken `step` steps begins.

    Args:
        goes_on: the trainer was not started again, so that `step` follows all that it trained.
        base: step at which reinforcement learning began.
        batch: episodes of a step.
        name: of the journal, for messages.

    Raises:
        DataError: the journal begins after the checkpoint, or ends before it.
        InvariantBroken: the rows contradict each other.
    """
    replays = _replays(recorded, max(step, base), name)
    groups = sorted(recorded.groups.values(), key=lambda group: group.order)
    queued = tuple(group for group in groups if group.state == "queued")
    if bare := [group.number for group in queued if group.place is None]:
        raise InvariantBroken(f"{name}: groups {bare[:5]} are queued without a payload")
    pending = [group for group in groups if group.state in ("begun", "waiting")]
    return Recovered(
        _accounts(recorded.accounts, (max(step, base) - base) * batch, replays.values(), sum(group.episodes for group in queued), name),
        replays,
        queued,
        tuple(Start(group.number, group.attempt, group.failures) for group in pending),
        recorded.next,
        max((group.order for group in groups if group.place is not None), default=0),
        recorded.lineage + bool(replays and not goes_on),
    )


def reopen(recorded: JournalRows, step: int, base: int, name: str) -> Reopened:
    """Return what the trainer of a queue that goes on gets again, when it is started again in place and has taken `step` steps.

    Args:
        recorded: the rows as they are, while nothing is leased or committed.
        base, name: as for `recover`, like the errors.
    """
    replays = _replays(recorded, max(step, base), name)
    over = [lease for lease in replays.values() if lease.committed]
    skipped: Counter[str] = Counter()
    for lease in over:
        if lease.skipped:
            skipped[lease.skipped] += lease.count
    trained = sum(lease.count for lease in over if not lease.skipped)
    return Reopened(step, replays, trained, dict(skipped), recorded.lineage + bool(replays))


def _replays(recorded: JournalRows, reached: int, name: str) -> dict[int, RecordedLease]:
    """Return the leases of steps from `reached` on, by step. Raises as `recover`."""
    first = reached if recorded.first is None else recorded.first
    leases = [recorded.leases[one] for one in sorted(recorded.leases) if one >= first]
    if [lease.step for lease in leases] != list(range(first, first + len(leases))):
        raise InvariantBroken(f"{name}: leases of steps {[lease.step for lease in leases]}, expected all from {first} on")
    hint = f"delete {name}: what was queued or under way is then sampled again; or bring back the checkpoint that belongs to it"
    if not first <= reached <= first + len(leases):
        held = f"steps {first} to {first + len(leases)}" if leases else f"step {first}"
        raise DataError(name, got=f"a journal of {held}", expected=f"step {reached}, where the checkpoint is", hint=hint)
    replays = {lease.step: lease for lease in leases if lease.step >= reached}
    for lease in replays.values():
        for one in lease.groups:
            group = recorded.groups.get(one.number)
            if group is None or group.state != "leased" or group.step != lease.step or group.place is None:
                raise InvariantBroken(f"{name}: group {one.number} of the lease of step {lease.step} is recorded as {group}")
    return replays


def _accounts(before: Accounts | None, over: int, replays: Collection[RecordedLease], queued: int, name: str) -> Accounts:
    """Return the ledger with which a queue begins; `over`: episodes of steps before the checkpoint, trained or skipped."""
    leased = sum(lease.count for lease in replays)
    if before is None:
        if leased or queued:
            raise InvariantBroken(f"{name}: {queued} queued and {leased} leased episodes, but no ledger")
        return Accounts(Ledger(started=over, trained=over))
    old, skipped = before.ledger, _still_skipped(before.skipped, replays)
    skips = sum(skipped.values())
    lost = old.started - old.dropped - old.rejected - old.requeued - queued - leased - over
    if lost < 0 or skips > over or min(skipped.values(), default=0) < 0:
        kept = f"{over} trained or skipped, {leased} leased and {queued} queued episodes, skipped {skipped}"
        raise InvariantBroken(f"{name}: {kept}: not what the ledger says: {old}")
    ledger = replace(
        old, running=0, spare=0, queued=queued, leased=leased, trained=over - skips, skipped=skips, requeued=old.requeued + lost
    )
    requeued = {**before.requeued, RESTART: before.requeued.get(RESTART, 0) + lost} if lost else before.requeued
    return replace(before, ledger=ledger, requeued=requeued, skipped={reason: count for reason, count in skipped.items() if count})


def _still_skipped(before: Mapping[str, int], replays: Iterable[RecordedLease]) -> dict[str, int]:
    """Return skipped episodes by reason without those that are replayed."""
    left = Counter(before)
    for lease in replays:
        if lease.skipped:
            left[lease.skipped] -= lease.count
    return dict(left)
