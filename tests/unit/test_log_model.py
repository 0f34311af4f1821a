"""Recovery against a model of it, on random schedules with kills of everything and of the trainer."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.log.log import Place
from asyncmoe.queue import records
from asyncmoe.queue.fold import RecordedStep
from asyncmoe.queue.queue_log import OWN
from asyncmoe.queue.records import Start, StepLeased
from asyncmoe.rpc.messages import Leased
from tests.redis_server import needed
from tests.unit.log_lives import BATCH, SIZE, Home, home_of, live
from tests.unit.test_queue_model import make_group

Trained = tuple[tuple[str, float], ...]


@dataclass
class Model:
    """What the run must know, kept in plain lists.

    Attributes:
        order: groups that were begun or wait to start again, in order; running and waiting: those of them that run, and that wait.
        ended: episodes that were dropped or rejected.
        leases: what each step was answered.
        skips: why steps were skipped, in the lineage behind the newest weights.
        stopped: groups that ran at a kill.
        begin: first step of the recorded window.
    """

    next: int = 0
    order: list[Start] = field(default_factory=list)
    running: list[Start] = field(default_factory=list)
    waiting: list[Start] = field(default_factory=list)
    queued: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    leases: dict[int, Trained] = field(default_factory=dict)
    frames: dict[int, bytes] = field(default_factory=dict)
    skips: dict[int, str] = field(default_factory=dict)
    step: int = 0
    stopped: int = 0
    saved: list[int] = field(default_factory=lambda: [0])
    begin: int = 0


class Program:
    """A random schedule of one run, which is killed now and then."""

    def __init__(self, draw: random.Random, folder: Path, home: Home) -> None:
        self.draw, self.folder, self.home, self.model, self.lives = draw, folder, home, Model(), 0
        self.versions: dict[int, int] = {}

    async def run(self, actions: int) -> None:
        self.life = await live(self.home, self.path, rule="requeue")
        for _ in range(actions):
            await self.draw.choice(
                (self.start, self.start, self.start, self.finish, self.finish, self.fall, self.train, self.train, self.save)
            )()
            if self.draw.random() < 0.08:
                await self.killed()
            if self.draw.random() < 0.08:
                await self.trainer_lost()
        self.check_once()
        self.life.log.close()

    @property
    def path(self) -> Path:
        return self.folder / str(self.lives)

    async def start(self) -> None:
        if not self.life.queue.can_start(SIZE):
            return
        if self.model.waiting:
            one = self.model.waiting.pop(0)
        else:
            one, self.model.next = Start(self.model.next), self.model.next + 1
            self.model.order.append(one)
        self.life.queue.started(SIZE)
        self.life.log.starts(one)
        self.model.running.append(one)
        self.versions[one.number] = self.life.queue.version

    async def finish(self) -> None:
        if not self.model.running or not self.life.queue._lanes["rl"].fits(SIZE):
            return
        one = self.model.running.pop(self.draw.randrange(len(self.model.running)))
        made = make_group(one.number, SIZE, [self.versions[one.number], self.life.queue.version])
        await self.life.put(made)
        self.model.order.remove(one)
        self.model.queued.add(one.number)

    async def fall(self) -> None:
        if not self.model.running:
            return
        one = self.model.running.pop(self.draw.randrange(len(self.model.running)))
        self.life.queue.ended(SIZE, "rejected", "engine_died")
        self.model.order.remove(one)
        if self.draw.random() < 0.5:
            again = Start(one.number, one.attempt + 1, one.failures + 1)
            self.life.log.starts(again)
            self.model.waiting.append(again)
            self.model.order.append(again)
        else:
            self.life.log.ended(one.number)
            self.model.ended.add(one.number)

    async def train(self) -> None:
        step, leased = self.model.step, await self.leased()
        if not leased.items:
            return
        answer = tuple((item.key, item.weight) for item in leased.items)
        frames = await self.life.fetched(leased)
        assert leased.replayed == (step in self.model.leases)
        assert self.model.leases.setdefault(step, answer) == answer, "a lease is replayed as it was"
        assert self.model.frames.setdefault(step, frames) == frames
        if self.draw.random() < 0.1:
            await self.killed()
            return
        why = self.draw.choice(("", "", "anomaly_loss", "anomaly_grad_norm"))
        self.life.queue.commit(step, why)
        if why:
            self.model.skips[step] = why
        self.model.step += 1
        self.life.queue.set_version(max(self.model.step, self.life.queue.version))
        self.check_skips()

    async def save(self) -> None:
        if self.model.step > self.model.saved[-1]:
            self.model.saved = [*self.model.saved, self.model.step][-2:]
            self.model.begin = self.draw.randint(self.model.begin, self.model.saved[0])
            await self.life.log.forget(self.model.saved[0], self.model.begin)

    async def killed(self) -> None:
        model, old = self.model, self.life
        self.lives += 1
        old.kill(self.path)
        model.step = self.draw.choice(model.saved)
        model.saved = [step for step in model.saved if step <= model.step]
        model.skips = {step: why for step, why in model.skips.items() if step < model.step}
        self.life = await live(self.home, self.path, model.step, rule="requeue")
        await self.check_window()
        assert list(self.life.starts) == model.order
        assert self.life.next == model.next
        ledger, requeued = self.life.queue.ledger, self.life.queue.accounts.requeued
        ahead = [step for step in model.leases if step >= model.step]
        assert ledger.queued == SIZE * len(model.queued)
        assert ledger.leased == BATCH * len(ahead)
        model.stopped += len(model.running)
        assert (ledger.running, requeued.get("restart", 0)) == (0, SIZE * model.stopped)
        self.check_skips()
        model.waiting, model.running = list(model.order), []
        self.check_once()
        if self.draw.random() < 0.4:
            await self.killed()  # before anything is leased again

    async def trainer_lost(self) -> None:
        """The trainer alone is lost, perhaps with a lease that it holds, and goes back to a checkpoint; queue and producer go on."""
        model, life = self.model, self.life
        if self.draw.random() < 0.5:
            await self.train()  # perhaps killed meanwhile, which begins another life
            life = self.life
        if self.draw.random() < 0.5 and model.step not in model.leases:
            await self.leased_only()
        back = self.draw.choice(model.saved)
        life.queue.trainer_lost()
        await asyncio.gather(self.finish(), self.start())
        before, version, history = life.queue.ledger, life.queue.version, life.log.history
        life.queue.reopen(back, life.log.reopening(back, 0, BATCH))
        model.step = back
        model.saved = [step for step in model.saved if step <= back]
        model.skips = {step: why for step, why in model.skips.items() if step < back}
        ahead, after = [step for step in model.leases if step >= back], life.queue.ledger
        assert life.log.history == history + bool(ahead)
        assert (after.started, after.running, after.queued, life.queue.version) == (before.started, before.running, before.queued, version)
        assert after.queued == SIZE * len(model.queued)
        assert after.leased == BATCH * len(ahead)
        assert life.queue.trained_steps == back
        self.check_skips()
        self.check_once()

    async def leased_only(self) -> None:
        """The trainer is given a batch, and is lost before it has trained on it."""
        leased = await self.leased()
        if leased.items:
            self.model.leases[self.model.step] = tuple((item.key, item.weight) for item in leased.items)
            self.model.frames[self.model.step] = await self.life.fetched(leased)

    async def leased(self) -> Leased:
        """What the queue has for the next step; groups that are too old for it start again."""
        leased = await self.life.queue.lease(self.model.step, "rl", BATCH, self.model.step, 0.0)
        late = self.life.queue.take_requeued()
        self.model.waiting += late
        self.model.order += late
        self.model.queued -= {one.number for one in late} | {item.group for item in leased.items}
        return leased

    async def check_window(self) -> None:
        """The log has the batch of every step of the window, and the fold knows where."""
        entries = [(at, records.entry(data).change) for at, data in self.life.log._changes.read()]
        leases = {one.step: (at, one) for at, one in entries if isinstance(one, StepLeased)}
        for step in (step for step in self.model.leases if step >= self.model.begin):
            at, lease = leases[step]
            groups = zip(await self.life.log.groups(lease.groups), lease.groups, strict=True)
            assert tuple((item.key, one.weight) for group, one in groups for item in group.items) == self.model.leases[step]
            oldest = min(one.place.position for one in lease.groups)
            assert self.life.log.state.recorded[step] == RecordedStep(at, (Place(OWN, oldest),))

    def check_skips(self) -> None:
        """Every step that is over was trained or skipped, under the reason of the newest lineage."""
        accounts, skipped = self.life.queue.accounts, Counter(self.model.skips.values())
        assert accounts.ledger.trained == BATCH * (self.model.step - len(self.model.skips))
        assert accounts.all_dropped == {why: BATCH * steps for why, steps in skipped.items()}

    def check_once(self) -> None:
        keys = [key for step in sorted(self.model.leases) for key, _ in self.model.leases[step]]
        assert len(keys) == len(set(keys)), "trained once"
        leased = {int(key[1:].split(".")[0]) for key in keys}
        known = [leased, self.model.queued, self.model.ended, {one.number for one in self.model.order}]
        assert sorted(number for one in known for number in one) == list(range(self.model.next)), "each group is in one state"


@settings(max_examples=10)
@given(seed=st.integers(0, 1 << 32), actions=st.integers(10, 60))
def test_recovery_agrees_with_a_model_of_it(seed: int, actions: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(Program(random.Random(seed), Path(folder), Home()).run(actions), 60))


@needed()
def test_so_it_does_in_redis(tmp_path: Path) -> None:
    with home_of("redis") as home:
        for seed in range(3):
            asyncio.run(asyncio.wait_for(Program(random.Random(seed), tmp_path / str(seed), home).run(40), 60))
