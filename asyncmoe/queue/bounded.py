"""The queue between engines and trainer: bounded, oldest first, leased by step.

One asyncio loop owns the queue; nothing here is thread-safe. The queue counts episodes. An episode is one trajectory, or one trajectory of
each agent that spoke, kept or discarded together. Every started episode ends as exactly one of trained, dropped, rejected, requeued or
skipped, the last four under a reason, and the counts add up after every call (`asyncmoe.queue.admission.Ledger`).

Guarantees to the trainer. The answer to `lease(step)` is decided once: every rank gets the same answer, whenever it asks. A leased
trajectory keeps its arrays until `commit(step)` or `reopen`. No trajectory is trained twice. No trained trajectory has a token more
than `Admission.age_bound` versions (max_staleness, unless old groups are downweighted) older than the trainer's weights.

After a resume at step k (`trained_steps=k`) the versions and the capacity law continue from k, as if everything up to k had passed through
this queue: leases from step k on are granted again, unchanged, queued groups are queued, and running ones start again
(`asyncmoe.queue.fold`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from asyncmoe.errors import AsyncmoeError, InvariantBroken, ProtocolError
from asyncmoe.log.log import Place
from asyncmoe.queue.admission import Admission, Ledger
from asyncmoe.queue.condition import Changes
from asyncmoe.queue.fold import NEW, Recovered
from asyncmoe.queue.group_buffer import Group, GroupBuffer, weighed
from asyncmoe.queue.leases import Leases, LeaseTerms
from asyncmoe.queue.queue_log import QueueLog
from asyncmoe.queue.records import Start
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Leased, Phase


class BoundedQueue:
    """The queue of one run.

    Args:
        admission: the staleness policy; its batch is a multiple of `group_size`.
        capacity: maximum number of episodes, including leased ones, beyond which `put` waits; at least a batch.
        group_size: episodes in a group.
        trained_steps: optimizer steps taken before this queue was created, warm-up included.
        demonstrations: capacity of the warm-up lane; 0: no warm-up.
        on_stale: called with the groups that the staleness rule refuses, whether they are requeued, and the trainer's version.
        on_freed: called with the numbers of groups that the queue no longer references.
        log: records every change.
        resumed: the state that an earlier process left in the log.
        queued: its queued groups, read from the log.

    Attributes:
        accounts: counts of all episodes, by state and reason.
        log: as above.
    """

    def __init__(
        self,
        admission: Admission,
        log: QueueLog,
        *,
        capacity: int,
        group_size: int,
        trained_steps: int = 0,
        demonstrations: int = 0,
        on_stale: Callable[[Sequence[Group], bool, int], None] = lambda *_: None,
        on_freed: Callable[[Sequence[int]], None] = lambda _: None,
        resumed: Recovered = NEW,
        queued: Sequence[Group] = (),
    ) -> None:
        self.admission = admission
        self.accounts = resumed.accounts
        self._group_size = group_size
        self._on_stale = on_stale
        self._lanes: dict[Phase, GroupBuffer] = {"rl": GroupBuffer(capacity, on_freed), "warmup": GroupBuffer(demonstrations)}
        self._version = 0
        self._leases = Leases(trained_steps, trained_steps - 1)
        self._arrivals = resumed.arrivals
        self._again: list[Start] = list(resumed.starts)
        self._stopping = False
        self._changes = Changes()
        self.log, self._reading = log, asyncio.Lock()
        self._served = max(resumed.replays, default=-1) + 1
        """Newest version that an earlier process may have published."""
        self.log.accounts = lambda: self.accounts
        for group in queued:
            self._lanes["rl"].insert(group)

    # ------------------------------------------------------------ producer side

    @property
    def version(self) -> int:
        """Weight version that all engines serve."""
        return self._version

    @property
    def newest_version(self) -> int:
        """Newest version that may have sampled a token of a group put now."""
        # One engine serves the next version slightly before all do. Turns recorded before a restart can be newer than the replayed steps.
        return max(self._version, self._served) + 1

    def set_version(self, version: int) -> None:
        """Record that all engines serve `version` now."""
        if version < self._version:
            raise InvariantBroken(f"queue: got version {version} after {self._version}, expected versions that do not fall")
        self._version = version
        self._changes.wake()

    def can_start(self, count: int) -> bool:
        """Whether the capacity law admits `count` more episodes now."""
        return self.admission.may_start(self.ledger, count, self._version)

    async def wait_can_start(self, count: int) -> None:
        """Wait until `count` more episodes may start. Call `started` before the next await, or another task may use the capacity.

        Raises:
            AsyncmoeError: the error passed to `fail`.
        """
        await self._changes.until(lambda: self.can_start(count) or None)

    def started(self, count: int) -> None:
        """Record the start of `count` episodes. Raises InvariantBroken if it violates the capacity law."""
        if not self.can_start(count):
            raise InvariantBroken(f"queue: {count} more episodes violate the capacity law at version {self._version}: {self.ledger}")
        self._count(self.ledger.start(count))

    def ended(self, count: int, to: Literal["rejected", "dropped"], reason: str) -> None:
        """Record that `count` started episodes failed, or are not worth queueing; they count as rejected or dropped under `reason`."""
        self.accounts = self.accounts.end(count, "running", to, reason)
        self._changes.wake()

    def take_requeued(self) -> list[Start]:
        """Return the groups requeued since the last call, in order; the caller starts them again."""
        again, self._again = self._again, []
        return again

    async def put(self, group: Group) -> None:
        """Queue a complete group that was `started`; waits while the queue is full.

        If this raises, the group still counts as running: the caller must report it as `ended`.

        Raises:
            InvariantBroken: a key is already queued or leased.
            StorageError: the log cannot be written.
            AsyncmoeError: the error passed to `fail`.
        """
        self._arrivals += 1
        group = replace(group, arrival=self._arrivals)
        await self.log.finished(group)
        await self._insert(self._lanes["rl"], group)

    async def put_demonstrations(self, shown: Sequence[Group]) -> None:
        """Queue warm-up demonstrations one by one; waits while their lane is full. Demonstrations have no staleness."""
        for group in shown:
            self._arrivals += 1
            await self._insert(self._lanes["warmup"], replace(group, arrival=self._arrivals))

    @property
    def shown(self) -> list[Place]:
        """Places, in the log, of the demonstrations that are queued or leased: no record mentions demonstrations."""
        return [group.place for group in self._lanes["warmup"].all if group.place is not None]

    # ------------------------------------------------------------ trainer side

    @property
    def trained_steps(self) -> int:
        """Optimizer steps taken before this queue was created, plus steps committed since."""
        return self._leases.trained_steps

    async def lease(self, step: int, phase: Phase, count: int, version: int, wait_s: float) -> Leased:
        """Lease the batch of step `step`: whole groups, `count` episodes in all, oldest first.

        Before that, groups with a token more than `Admission.age_bound` versions older than `version` are dropped (rule requeue: requeued)
        for the reason "stale". With rule downweight, items carry their weight. Any number of ranks may ask, at any time until the commit,
        and get the same answer. An answer without items (and with `stop` false) means that `wait_s` expired: ask again.

        Raises:
            ProtocolError: the step was already committed, ranks disagree on the step's terms, `count` is not whole groups, `version` is
                older than the engines', or uncommitted steps have leased too many episodes.
            ConfigError: `count` exceeds the capacity.
            StorageError, DataError: the log cannot be written or read.
            AsyncmoeError: the error passed to `fail`.
        """
        if phase == "rl" and count % self._group_size:
            raise ProtocolError(f"lease of step {step}: got count {count}, expected whole groups of {self._group_size}")
        if phase == "rl" and version < self._version and not self._is_replay(step):
            raise ProtocolError(f"lease of step {step}: got version {version}, expected at least {self._version}, which the engines serve")
        terms = LeaseTerms(phase, count, version)
        self._leases = self._leases.ask(step, terms, self._lanes[phase].capacity)
        if phase == "rl" and not self._stopping:
            await self._replay(step, terms)
        answer = await self._changes.until(lambda: self._try_lease(step, terms), wait_s)
        await self.log.settled()
        return answer if answer is not None else self._answer(step, phase)

    def commit(self, step: int, dropped: str = "") -> None:
        """End the lease of a trained step and free its arrays. Idempotent; steps commit in order.

        Args:
            dropped: why the step left its batch untrained; empty: it was trained. An untrained batch counts as dropped under this reason,
                and keeps using capacity under the law, because its step is over.

        Raises:
            ProtocolError: `step` was never leased, or an earlier step is not committed yet.
        """
        if step <= self._leases.last_commit:
            return
        phase = self._leases.phase(step)
        self._leases = self._leases.commit(step)
        groups = self._lanes[phase].commit(step)
        if phase == "rl":
            count = sum(map(len, groups))
            if dropped:
                self.accounts = self.accounts.end(count, "leased", "skipped", dropped)
            else:
                self._count(self.ledger.move(count, "leased", "trained"))
        self.log.committed(step, dropped)
        self._changes.wake()

    # ------------------------------------------------------------ controller side

    def trainer_lost(self) -> None:
        """Record that the trainer is lost: grant it no more leases, and refuse its pending requests."""
        self._leases = self._leases.undecided_forgotten()
        self._changes.wake()

    def reopen(self, step: int, found: Recovered) -> None:
        """Return to a checkpoint with a restarted trainer; call it after `trainer_lost`.

        Leases since the checkpoint are granted again as they were. Everything else stays: queued and running groups, the versions and the
        capacity law. Demonstrations are dropped, including leased ones: the caller puts those that follow the checkpoint again.

        Raises:
            InvariantBroken: the leases do not belong to this queue.
        """
        self._leases, ledger = self._leases.reopen(step), found.accounts.ledger
        ledger = replace(self.ledger, leased=ledger.leased, trained=ledger.trained, skipped=ledger.skipped)
        self.accounts = replace(self.accounts, ledger=ledger, skipped=found.accounts.skipped)
        self._lanes["rl"].forget_leases()
        self._lanes["warmup"].clear()  # so that a waiting `put_demonstrations` adds to the discarded buffer
        self._lanes["warmup"] = GroupBuffer(self._lanes["warmup"].capacity)
        self.log.reopened(found)
        self._changes.wake()

    def stop(self) -> None:
        """Ask the trainer to stop: every undecided lease is answered with `stop`."""
        self._stopping = True
        self._changes.wake()

    def fail(self, error: AsyncmoeError) -> None:
        """Record that no more trajectories will come: current and future waits raise `error`. Calls that need not wait still succeed."""
        self._changes.fail(error)

    @property
    def ledger(self) -> Ledger:
        """Counts of all episodes by state."""
        return self.accounts.ledger

    # ------------------------------------------------------------ internals

    def _try_lease(self, step: int, terms: LeaseTerms) -> Leased | None:
        if self._leases.answer_to(step, terms) is None:
            if self._stopping:
                self._leases = self._leases.decide(step, self._answer(step, terms.phase, stop=True))
            else:
                self._grant(step, terms)
        return self._leases.answer_to(step, terms)

    def _grant(self, step: int, terms: LeaseTerms) -> None:
        lane = self._lanes[terms.phase]
        if terms.phase == "rl":
            self._refuse(lane.drop_older(self.admission.oldest_allowed(terms.version)), terms.version)
        groups = lane.lease(step, terms.count)
        if groups is None:
            return
        weights = [1.0] * len(groups)
        if terms.phase == "rl":
            self._count(self.ledger.move(terms.count, "queued", "leased"))
            newest = max(g.newest_version for g in groups)
            if newest > terms.version:
                raise InvariantBroken(f"lease of step {step}: got a token of version {newest}, expected at most {terms.version}")
            weights = [self.admission.weight(group.oldest_version, terms.version) for group in groups]
            self.log.leased(step, terms.count, terms.version, list(zip(groups, weights, strict=True)))
        self._decide(step, terms.phase, groups, weights)

    def _is_replay(self, step: int) -> bool:
        """Return whether a step's lease was first granted to an earlier trainer; the lease then has that trainer's older version."""
        answer = self._leases.answers.get(step)
        return step in self.log.replays or (answer is not None and answer.replayed)

    async def _replay(self, step: int, terms: LeaseTerms) -> None:
        """Answer a step with the lease that an earlier trainer was granted, if any; the ledger counts it as leased already."""
        async with self._reading:
            found = await self.log.replayed(step, terms)
        if found is not None and step not in self._leases.answers:  # else the run is stopping, and a rank has been told so
            groups, weights = found
            self._lanes["rl"].hold(step, groups)
            self._decide(step, "rl", groups, weights, replayed=True)

    def _decide(self, step: int, phase: Phase, groups: Sequence[Group], weights: Sequence[float], *, replayed: bool = False) -> None:
        items = tuple(item for group, weight in zip(groups, weights, strict=True) for item in weighed(group, weight))
        self._leases = self._leases.decide(step, self._answer(step, phase, items, replayed=replayed))
        self._changes.wake()

    def _refuse(self, stale: Sequence[Group], version: int) -> None:
        count = sum(map(len, stale))
        if not count:
            return
        requeued = self.admission.rule == "requeue"
        self.accounts = self.accounts.end(count, "queued", "requeued" if requeued else "dropped", "stale")
        for group in stale:
            if requeued:
                self._again.append(Start(group.number, group.attempt + 1))
                self.log.starts(self._again[-1])
            else:
                self.log.ended(group.number)
        self._on_stale(stale, requeued, version)
        self._changes.wake()

    def _count(self, ledger: Ledger) -> None:
        self.accounts = replace(self.accounts, ledger=ledger)

    def _answer(self, step: int, phase: Phase, items: tuple[Item, ...] = (), *, stop: bool = False, replayed: bool = False) -> Leased:
        depth, dropped = self._lanes[phase].depth, self.accounts.all_dropped
        return Leased(step, items, depth, dropped, stop, self.log.history, replayed)

    async def _insert(self, lane: GroupBuffer, group: Group) -> None:
        lane.putting.append(group.arrival)
        try:
            await self._changes.until(lambda: (lane.putting[0] == group.arrival and lane.fits(len(group))) or None)
            lane.insert(group)
            if lane is self._lanes["rl"]:
                self._count(self.ledger.move(len(group), "running", "queued"))
        finally:
            lane.putting.remove(group.arrival)
            self._changes.wake()
