"""The queue against a one-page model, on random schedules and under every rule; it never gets stuck."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncmoe.config.queue import StalenessRule
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.records import Start
from asyncmoe.rpc.messages import Leased
from asyncmoe.trajectory import Trajectory
from benchmarks.unlogged import Unlogged
from tests.unit.example_counts import examples
from tests.unit.kept_trajectory import sampled
from tests.unit.putting import put_group

RANKS = 3


def make_group(number: int, size: int, versions: list[int], attempt: int = 0) -> list[Trajectory]:
    """`size` trajectories; one of them starts at `versions[0]`, the others at `versions[-1]`."""
    tokens, mask = [1, 2, number % 1000], np.array([0, 1, 1], bool)
    return [
        sampled(tokens, mask, versions=[0, first, versions[-1]], group=number, episode=e, reward=float(e), attempt=attempt)
        for e, first in enumerate([versions[0], *versions[-1:] * (size - 1)])
    ]


@dataclass(eq=False)
class One:
    """A group of the model. `oldest`: version served when it started, which its first token is of."""

    start: Start
    oldest: int
    arrival: int = 0


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class QueueMachine(RuleBasedStateMachine):
    """Real queue on a private loop; after every action the loop runs until nothing more happens, and both must agree."""

    @initialize(
        max_staleness=st.integers(0, 2),
        groups=st.integers(1, 3),
        size=st.integers(1, 2),
        room=st.integers(0, 3),
        policy=st.sampled_from(["drop", "requeue", "downweight"]),
        base=st.integers(0, 2),
    )
    def begin(self, max_staleness: int, groups: int, size: int, room: int, policy: StalenessRule, base: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.max_staleness, self.groups, self.size, self.capacity, self.policy = max_staleness, groups, size, groups + room, policy
        self.base, self.bound = base, max_staleness + 2 * (policy == "downweight")
        law = Admission(groups * size, max_staleness, base, policy, 0.5, self.bound if policy == "downweight" else None)
        self.queue = BoundedQueue(law, Unlogged(), capacity=self.capacity * size, group_size=size, trained_steps=base)
        self.next, self.requeued = 0, list[Start]()
        self.again: list[Start] = []
        self.running: list[One] = []
        self.putting: list[One] = []
        self.puts: dict[One, asyncio.Task[None]] = {}
        self.queued: list[One] = []
        self.leased: list[One] | None = None
        self.asked: list[asyncio.Task[Leased]] = []
        self.arrivals, self.version, self.step = 0, 0, base
        self.over: Counter[str] = Counter()
        """Episodes that have ended, by state or reason."""
        self.trained: set[int] = set()

    # -------------------------------------------------- actions

    @rule(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        for _ in range(count):
            self._start()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 4))
    def finish(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.running))):
            self._finish(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), why=st.sampled_from(("score", "equal")))
    def lose(self, data: st.DataObject, why: str) -> None:
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.queue.ended(self.size, "rejected" if why == "score" else "dropped", why)
        self.over[why] += self.size
        self._settle()

    @precondition(lambda self: self.version < self.step)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self._publish(data.draw(st.integers(self.version, self.step)))

    @precondition(lambda self: len(self.asked) < RANKS)
    @rule()
    def a_rank_asks(self) -> None:
        self.asked.append(self._task(self.queue.lease(self.step, "rl", self.groups * self.size, self.step, 3600.0)))
        self._settle()

    @precondition(lambda self: self.leased is not None)
    @rule(times=st.integers(1, 3), why=st.sampled_from(("", "", "anomaly_loss")))
    def commit(self, times: int, why: str = "") -> None:
        for _ in range(times):
            self.queue.commit(self.step, why)
        numbers = {one.start.number for one in self.leased}
        assert not numbers & self.trained
        self.trained |= numbers
        self.over["skipped" if why else "trained"] += self.size * len(self.leased)
        self.leased, self.asked = None, []
        self.step += 1
        self._settle()

    @rule(rounds=st.integers(1, 4), count=st.integers(1, 3))
    def leave_stragglers_behind(self, rounds: int, count: int) -> None:
        """Whatever starts after some groups is trained before them, so that they come as old as they may be, or older."""
        self.start(count)
        late = self.running[: min(count, self.max_staleness * self.groups)]  # more would take the places of the next batch
        for _ in range(rounds):
            self._go_on([one for one in self.running if one not in late])
        for one in late:
            self._finish(one)

    # -------------------------------------------------- the model

    def _go_on(self, finishing: list[One]) -> None:
        """Publish, start what may start, finish these groups and what starts now, and train a step if there is a batch for it."""
        if self.leased is not None:
            self.commit(1)
        self._publish(self.step)
        known = len(self.running)
        while self._start():
            pass
        for one in [*finishing, *self.running[known:]]:
            self._finish(one)
        if not self.asked:
            self.a_rank_asks()

    def _start(self) -> bool:
        """Start a group if the law has a place for it, one that is started again before a new one; return whether it has."""
        alive = len(self.running) + len(self.putting) + len(self.queued) + len(self.leased or ())
        places = (self.max_staleness + self.version - self.base + 1) * self.groups if self.version >= self.base else 0
        may = alive + 1 + (self.over["trained"] + self.over["skipped"]) // self.size <= places
        assert self.queue.can_start(self.size) == may
        if may:
            assert self.queue.take_requeued() == self.requeued
            self.again += self.requeued
            self.requeued = []
            if self.again:
                begun = self.again.pop(0)
            else:
                begun, self.next = Start(self.next), self.next + 1
            self.queue.started(self.size)
            self.running.append(One(begun, self.version))
        return may

    def _publish(self, version: int) -> None:
        self.version = version
        self.queue.set_version(version)
        self._settle()

    def _finish(self, one: One) -> None:
        self.running.remove(one)
        self.arrivals += 1
        one.arrival = self.arrivals
        self.putting.append(one)
        made = make_group(one.start.number, self.size, [one.oldest, self.version], one.start.attempt)
        self.puts[one] = self._task(put_group(self.queue, made))
        self._settle()

    def _settle(self) -> None:
        self._model()
        self.loop.run_until_complete(_turns(30))
        for one, task in list(self.puts.items()):
            assert task.done() == (one not in self.putting)
            if task.done():
                task.result()
                del self.puts[one]
        for lease in self.asked:
            assert lease.done() == (self.leased is not None)
            if self.leased is not None:
                items = lease.result().items
                assert [i.key for i in items] == self._keys(self.leased)
                assert all(self.step - i.oldest_version <= self.bound for i in items)
                ages = [self.step - one.oldest for one in self.leased for _ in range(self.size)]
                assert [i.weight for i in items] == [0.5 ** max(0, age - self.max_staleness) for age in ages]

    def _keys(self, groups: list[One]) -> list[str]:
        return [f"g{one.start.number}.e{e}" for one in groups for e in range(self.size)]

    def _in_order(self) -> list[One]:
        return sorted(self.queued, key=lambda one: (one.oldest, one.arrival))

    def _model(self) -> None:
        while True:
            before = (len(self.putting), len(self.queued), self.leased is None)
            if self.asked and self.leased is None:
                for one in [one for one in self._in_order() if one.oldest < self.step - self.bound]:
                    self.queued.remove(one)
                    if self.policy == "requeue":
                        self.requeued.append(Start(one.start.number, one.start.attempt + 1))
                    self.over["requeued" if self.policy == "requeue" else "stale"] += self.size
                if len(self.queued) >= self.groups:
                    self.leased, self.queued = self._in_order()[: self.groups], self._in_order()[self.groups :]
            while self.putting and len(self.queued) + len(self.leased or ()) < self.capacity:
                self.queued.append(self.putting.pop(0))
            if before == (len(self.putting), len(self.queued), self.leased is None):
                return

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        accounts, ledger, size, over = self.queue.accounts, self.queue.ledger, self.size, self.over
        assert ledger.running == (len(self.running) + len(self.putting)) * size
        assert ledger.queued == len(self.queued) * size
        assert ledger.leased == len(self.leased or ()) * size
        assert ledger.started == ledger.running + ledger.queued + ledger.leased + over.total()
        assert (ledger.trained, ledger.skipped, ledger.requeued) == (over["trained"], over["skipped"], over["requeued"])
        dropped = {"anomaly_loss": over["skipped"], **{why: over[why] for why in ("stale", "equal")}}
        assert Counter(accounts.all_dropped) == Counter(dropped)
        assert (accounts.rejected.get("score", 0), accounts.requeued.get("stale", 0)) == (over["score"], over["requeued"])
        assert self.queue.trained_steps == self.step

    def teardown(self) -> None:
        """From any state a trainer that goes on gets its next batches: nothing is ever stuck, and what is owed starts again."""
        if not hasattr(self, "queue"):
            return
        for _ in range(2):
            if self.leased is not None:
                self.commit(1)
            self._publish(self.step)
            if not self.asked:
                self.a_rank_asks()
            for _ in range(20):
                if self.leased is not None:
                    break
                self._start()
                for one in self.running[:1]:
                    self._finish(one)
            assert self.leased is not None
        for task in (*self.puts.values(), *self.asked):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def _task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine)


TestQueueMachine = QueueMachine.TestCase
# To make a failing schedule short takes minutes: add Phase.shrink to read one.
TestQueueMachine.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None, phases=[Phase.reuse, Phase.generate], report_multiple_bugs=False
)
