"""The queue against a model of it that fits on a page, on random schedules; and that it never gets stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rpc.messages import Leased
from asyncmoe.trajectory import NOT_SAMPLED, Trajectory
from tests.unit.example_counts import examples
from tests.unit.putting import put_group

RANKS = 3


def make_group(number: int, size: int, versions: list[int]) -> list[Trajectory]:
    """`size` trajectories; one of them starts at `versions[0]`, the others at `versions[-1]`."""
    made = []
    for episode in range(size):
        first = versions[0] if episode == 0 else versions[-1]
        made.append(
            Trajectory(
                key=f"g{number}.e{episode}",
                group=number,
                episode=episode,
                tokens=np.array([1, 2, number % 1000], np.int32),
                loss_mask=np.array([0, 1, 1], bool),
                logprobs=np.array([0, -1, -1], np.float32),
                versions=np.array([NOT_SAMPLED, first, versions[-1]], np.int32),
                reward=float(episode),
                finish="stop",
            )
        )
    return made


class QueueMachine(RuleBasedStateMachine):
    """Real queue on a private loop; after every action the loop runs until nothing more happens, and both must agree."""

    @initialize(max_staleness=st.integers(0, 2), groups=st.integers(1, 3), size=st.integers(1, 2), spare=st.integers(0, 3))
    def begin(self, max_staleness: int, groups: int, size: int, spare: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.max_staleness, self.groups, self.size, self.capacity = max_staleness, groups, size, groups + spare
        self.queue = BoundedQueue(capacity=self.capacity * size, batch=groups * size, group_size=size, max_staleness=max_staleness)
        self.number = 0
        self.running: dict[int, int] = {}
        self.putting: list[tuple[int, int]] = []
        self.puts: dict[int, asyncio.Task[None]] = {}
        self.queued: list[tuple[int, int]] = []
        self.leased: list[tuple[int, int]] | None = None
        self.asked: list[asyncio.Task[Leased]] = []
        self.arrival: dict[int, int] = {}
        self.trained: set[int] = set()
        self.skipped: set[int] = set()
        self.dropped: set[int] = set()
        self.rejected: set[int] = set()
        self.step = self.version = 0

    # -------------------------------------------------- actions

    @rule()
    def start(self) -> None:
        alive = len(self.running) + len(self.putting) + len(self.queued) + len(self.leased or ()) + len(self.trained | self.skipped)
        may = alive + 1 <= (self.max_staleness + self.version + 1) * self.groups
        assert self.queue.can_start(self.size) == may
        if may:
            self.queue.started(self.size)
            self.running[self.number] = self.version
            self.number += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        oldest = self.running.pop(number)
        self.arrival[number] = len(self.arrival)
        self.putting.append((oldest, number))
        self.puts[number] = self._task(put_group(self.queue, make_group(number, self.size, [oldest, self.version])))
        self._settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[number]
        self.rejected.add(number)
        self.queue.rejected(self.size, "score")
        self._settle()

    @precondition(lambda self: self.version < self.step)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.version = data.draw(st.integers(self.version, self.step))
        self.queue.set_version(self.version)
        self._settle()

    @precondition(lambda self: len(self.asked) < RANKS)
    @rule()
    def a_rank_asks(self) -> None:
        self.asked.append(self._task(self.queue.lease(self.step, "rl", self.groups * self.size, self.step, 3600.0)))
        self._settle()

    @precondition(lambda self: self.leased is not None)
    @rule(times=st.integers(1, 3), why=st.sampled_from(("", "", "anomaly_loss")))
    def commit(self, times: int, why: str = "") -> None:
        assert self.leased is not None
        for _ in range(times):
            self.queue.commit(self.step, why)
        numbers = {number for _, number in self.leased}
        assert not numbers & (self.trained | self.skipped)
        if why:
            self.skipped |= numbers
        else:
            self.trained |= numbers
        self.leased, self.asked = None, []
        self.step += 1
        self._settle()

    # -------------------------------------------------- the model

    def _settle(self) -> None:
        self._model()
        for _ in range(30):
            self.loop.run_until_complete(asyncio.sleep(0))
        blocked = {number for _, number in self.putting}
        for number, task in list(self.puts.items()):
            assert task.done() == (number not in blocked)
            if task.done():
                task.result()
                del self.puts[number]
        for lease in self.asked:
            assert lease.done() == (self.leased is not None)
            if self.leased is not None:
                items = lease.result().items
                assert [i.key for i in items] == [f"g{n}.e{e}" for _, n in self.leased for e in range(self.size)]
                assert all(self.step - i.oldest_version <= self.max_staleness for i in items)

    def _in_order(self) -> list[tuple[int, int]]:
        return sorted(self.queued, key=lambda g: (g[0], self.arrival[g[1]]))

    def _model(self) -> None:
        while True:
            before = (len(self.putting), len(self.queued), self.leased is None)
            if self.asked and self.leased is None:
                stale = [g for g in self.queued if g[0] < self.step - self.max_staleness]
                self.dropped |= {number for _, number in stale}
                self.queued = [g for g in self._in_order() if g not in stale]
                if len(self.queued) >= self.groups:
                    self.leased, self.queued = self.queued[: self.groups], self.queued[self.groups :]
            while self.putting and len(self.queued) + len(self.leased or ()) < self.capacity:
                self.queued.append(self.putting.pop(0))
            if before == (len(self.putting), len(self.queued), self.leased is None):
                return

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        stats, ledger = self.queue.stats(), self.queue.ledger
        assert ledger.started == self.number * self.size
        assert ledger.running == (len(self.running) + len(self.putting)) * self.size
        assert stats.depth == len(self.queued) * self.size
        assert stats.leased == len(self.leased or ()) * self.size
        assert stats.trained == len(self.trained) * self.size
        assert stats.dropped.get("anomaly_loss", 0) == ledger.skipped == len(self.skipped) * self.size
        assert stats.dropped.get("stale", 0) == ledger.dropped == len(self.dropped) * self.size
        assert stats.rejected.get("score", 0) == ledger.rejected == len(self.rejected) * self.size
        assert self.queue.trained_steps == self.step

    def teardown(self) -> None:
        """From any state a trainer that goes on gets its next batches: nothing is ever stuck."""
        if not hasattr(self, "queue"):
            return
        for _ in range(2):
            if self.leased is not None:
                self.commit(1)
            self.version = self.step
            self.queue.set_version(self.version)
            self.a_rank_asks()
            for _ in range(20):
                if self.leased is not None:
                    break
                self.start()
                for number in sorted(self.running)[:1]:
                    oldest = self.running.pop(number)
                    self.arrival[number] = len(self.arrival)
                    self.putting.append((oldest, number))
                    self.puts[number] = self._task(put_group(self.queue, make_group(number, self.size, [oldest, self.version])))
                    self._settle()
            assert self.leased is not None
        for task in (*self.puts.values(), *self.asked):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def _task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)
