"""Recovery against a model of it, on random schedules with kills of everything and of the trainer; and real files, cut at every record."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import AsyncmoeError, DataError, InvariantBroken
from asyncmoe.journal import recovery
from asyncmoe.journal.recovery import JournalRows, LeasedGroup, RecordedGroup, RecordedLease, recover
from asyncmoe.journal.segment_format import Place
from asyncmoe.journal.states_file import FILE
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Ledger
from asyncmoe.queue.start_order import Start
from tests.unit.test_journal import BATCH, SIZE, Life, in_loop, kill, live
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
    saved: list[int] = field(default_factory=lambda: [0])


class Program:
    """A random schedule of one run, which is killed now and then."""

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw, self.folder, self.model, self.lives = draw, folder, Model(), 0
        self.versions: dict[int, int] = {}

    async def run(self, actions: int) -> None:
        self.life = await live(self.path, rule="requeue")
        for _ in range(actions):
            await self.draw.choice(
                (self.start, self.start, self.start, self.finish, self.finish, self.fall, self.train, self.train, self.save)
            )()
            if self.draw.random() < 0.08:
                await self.killed()
            if self.draw.random() < 0.08:
                await self.trainer_lost()
        self.check_once()
        self.life.journal.close()

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
        self.life.journal.begun(one)
        self.model.running.append(one)
        self.versions[one.number] = self.life.queue.version

    async def finish(self) -> None:
        if not self.model.running or not self.life.queue._lanes["rl"].fits(SIZE):
            return
        one = self.model.running.pop(self.draw.randrange(len(self.model.running)))
        made = make_group(one.number, SIZE, [self.versions[one.number], self.life.queue.version])
        await self.life.queue.put_group(made)
        self.model.order.remove(one)
        self.model.queued.add(one.number)

    async def fall(self) -> None:
        if not self.model.running:
            return
        one = self.model.running.pop(self.draw.randrange(len(self.model.running)))
        self.life.queue.rejected(SIZE, "engine_died")
        self.model.order.remove(one)
        if self.draw.random() < 0.5:
            again = Start(one.number, one.attempt + 1, one.failures + 1)
            self.life.journal.again(again, "engine_died")
            self.model.waiting.append(again)
            self.model.order.append(again)
        else:
            self.life.journal.ended(one.number, "rejected", "engine_died")
            self.model.ended.add(one.number)

    async def train(self) -> None:
        step = self.model.step
        leased = await self.life.queue.lease(step, "rl", BATCH, step, 0.0)
        late = self.life.queue.take_requeued()
        self.model.waiting += late
        self.model.order += late
        self.model.queued -= {one.number for one in late}
        if not leased.items:
            return
        answer = tuple((item.key, item.weight) for item in leased.items)
        frames = b"".join(bytes(one) for one in self.life.queue.fetch(step, [item.key for item in leased.items]))
        assert self.model.leases.setdefault(step, answer) == answer, "a lease is replayed as it was"
        assert self.model.frames.setdefault(step, frames) == frames
        self.model.queued -= {item.group for item in leased.items}
        chance = self.draw.random()
        if chance < 0.1:
            await self.killed()
            return
        if chance < 0.2 and max(self.model.leases) == step >= self.life.queue.version:
            self.life.queue.release(step)
            del self.model.leases[step], self.model.frames[step]
            self.model.queued |= {item.group for item in leased.items}
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
            await self.life.journal.forget(self.model.saved[0])

    async def killed(self) -> None:
        model, old = self.model, self.life
        self.lives += 1
        kill(old, self.folder / str(self.lives - 1), self.path)
        old.journal.close()
        model.step = self.draw.choice(model.saved)
        model.saved = [step for step in model.saved if step <= model.step]
        model.skips = {step: why for step, why in model.skips.items() if step < model.step}
        self.life = await live(self.path, model.step, rule="requeue")
        assert list(self.life.starts) == model.order
        assert self.life.next == model.next
        stats = self.life.queue.stats()
        ahead = [step for step in model.leases if step >= model.step]
        assert stats.depth == SIZE * len(model.queued)
        assert stats.leased == BATCH * len(ahead)
        assert stats.running == 0
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
        found, *_ = await asyncio.gather(life.journal.now(back, 0), self.finish(), self.start())
        before, lineage = life.queue.stats(), life.journal.lineage
        life.queue.reopen(found)
        model.step = back
        model.saved = [step for step in model.saved if step <= back]
        model.skips = {step: why for step, why in model.skips.items() if step < back}
        ahead, after = [step for step in model.leases if step >= back], life.queue.stats()
        assert life.journal.lineage == lineage + bool(ahead)
        assert (after.started, after.running, after.depth, after.version) == (before.started, before.running, before.depth, before.version)
        assert after.depth == SIZE * len(model.queued)
        assert after.leased == BATCH * len(ahead)
        assert life.queue.trained_steps == back
        self.check_skips()
        self.check_once()

    async def leased_only(self) -> None:
        """The trainer is given a batch, and is lost before it has trained on it."""
        step, held = self.model.step, self.life.queue
        leased = await held.lease(step, "rl", BATCH, step, 0.0)
        late = held.take_requeued()
        self.model.waiting += late
        self.model.order += late
        self.model.queued -= {one.number for one in late} | {item.group for item in leased.items}
        if leased.items:
            self.model.leases[step] = tuple((item.key, item.weight) for item in leased.items)
            self.model.frames[step] = b"".join(bytes(one) for one in held.fetch(step, [item.key for item in leased.items]))

    def check_skips(self) -> None:
        """Every step that is over was trained or skipped, under the reason of the newest lineage."""
        stats, skipped = self.life.queue.stats(), Counter(self.model.skips.values())
        assert stats.trained == BATCH * (self.model.step - len(self.model.skips))
        assert stats.dropped == {why: BATCH * steps for why, steps in skipped.items()}

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
        in_loop(Program(random.Random(seed), Path(folder)).run(actions))


# ---------------------------------------------------------------- cut files


async def scripted(folder: Path) -> None:
    """A run of three steps, with every kind of change."""
    life: Life = await live(folder)
    for number in range(8):
        life.begin(number)
    for number in (1, 0, 2, 3, 4, 5):
        await life.queue.put_group(make_group(number, SIZE, [0, 0]))
    await life.lease(0)
    life.queue.commit(0)
    life.queue.set_version(1)
    life.queue.rejected(SIZE, "engine_died")
    life.journal.again(Start(6, 1, 1), "engine_died")
    life.begin(6, 1)
    life.queue.discarded(SIZE, "equal_rewards")
    life.journal.ended(7, "dropped", "equal_rewards")
    await life.lease(1)
    life.queue.commit(1)
    await life.queue.put_group(make_group(6, SIZE, [1, 1]))
    await life.lease(2)
    kill(life, folder, folder.with_name("killed"))
    life.journal.close()


def cuts(log: bytes, page: int = 4096) -> Iterator[int]:
    """Every boundary of a frame in SQLite's write-ahead log, and places within some (https://www.sqlite.org/fileformat2.html#walformat)."""
    assert int.from_bytes(log[8:12]) == page
    for number, begin in enumerate(range(32, len(log) + 1, 24 + page)):
        yield begin
        if number % 4 == 0:
            yield min(begin + 100, len(log))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut")
    in_loop(scripted(folder / "run"))
    return folder / "killed"


def test_states_cut_anywhere_are_a_state_the_queue_had(killed: Path, tmp_path: Path) -> None:
    """And what they refer to is on disk: payloads cut after the last one they name can all be read."""
    log = (killed / "journal" / f"{FILE}-wal").read_bytes()
    seen = set()
    for number, cut in enumerate(cuts(log)):
        copy = tmp_path / str(number)
        shutil.copytree(killed, copy)
        (copy / "journal" / f"{FILE}-wal").write_bytes(log[:cut])
        seen.add(in_loop(read_all(copy)))
        shutil.rmtree(copy)
    assert max(seen) == (8, 4, 1, 0, 3)
    assert len(seen) >= 5, seen


def test_damage_in_the_log_is_named_with_its_cost_unless_it_may_be_a_torn_end(killed: Path, tmp_path: Path) -> None:
    log = (killed / "journal" / f"{FILE}-wal").read_bytes()
    frames = list(range(32, len(log), 24 + 4096))
    commits = [at for at in frames if int.from_bytes(log[at + 4 : at + 8])]
    newest = commits[-2] + 24 + 4096
    older = (*(at + 5 for at in frames if at < newest), *(at + 9 for at in frames if at <= commits[-3]))
    for place in (8, *older, *(at + within for at in frames for within in (17, 2000))):
        copy = tmp_path / str(place)
        shutil.copytree(killed, copy)
        (copy / "journal" / f"{FILE}-wal").write_bytes(log[:place] + bytes([log[place] ^ 1]) + log[place + 1 :])
        if place >= newest:
            in_loop(read_all(copy))
        else:
            with pytest.raises(DataError, match=rf"{FILE}-wal: got .* not whole.*expected a whole journal; delete .*sampled again"):
                in_loop(live(copy))
        shutil.rmtree(copy)
    assert len(commits) > 5


def test_what_an_earlier_start_left_behind_the_end_of_the_log_is_no_damage(killed: Path, tmp_path: Path) -> None:
    path = killed / "journal" / f"{FILE}-wal"
    torn, log = tmp_path / "torn", path.read_bytes()
    shutil.copytree(killed, torn)
    (torn / "journal" / path.name).write_bytes(log[:-2000] + bytes(100) + log[-1900:])
    for _ in range(3):
        in_loop(read_all(torn))


async def read_all(copy: Path) -> tuple[int, ...]:
    """Groups begun, queued at step 0, to start, and leases; every payload named is read."""
    life = await live(copy)
    found = recover(life.journal.recorded, 0, 0, BATCH, "j")
    for lease in found.replays.values():
        await life.lease(lease.step)
        life.queue.commit(lease.step)
    numbers = {group.number for group in found.queued} | {one.number for one in found.starts}
    numbers |= {one.number for lease in found.replays.values() for one in lease.groups}
    ended = {group.number for group in life.journal.recorded.groups.values() if group.state in ("dropped", "rejected")}
    assert numbers | ended == set(range(found.next))
    assert not numbers & ended
    life.journal.close()
    return found.next, len(found.replays) + len(ended), len(found.queued), len(found.starts), len(found.replays)


def test_a_payload_that_is_gone_is_one_line(killed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(killed, copy)
    largest = max((copy / "journal" / "segments").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 3] ^= 1
    largest.write_bytes(data)

    async def body() -> None:
        life = await live(copy)
        for step in range(3):
            await life.lease(step)
            life.queue.commit(step)

    with pytest.raises((DataError, AsyncmoeError)) as failed:
        in_loop(body())
    assert "\n" not in str(failed.value)


# ---------------------------------------------------------------- rows that contradict each other

PLACE = Place(0, 0, 0, 10)
ACCOUNTS = Accounts(Ledger(started=8, leased=4, queued=4))


def lease(step: int, *numbers: int) -> RecordedLease:
    return RecordedLease(step, BATCH, step, 0, False, tuple(LeasedGroup(number, 1.0, ()) for number in numbers))


def group(number: int, state: recovery.State, step: int | None = None, place: Place | None = PLACE) -> RecordedGroup:
    return RecordedGroup(number, number, state, step=step, episodes=SIZE, place=place)


@pytest.mark.parametrize(
    "recorded",
    [
        JournalRows({}, {0: lease(0), 2: lease(2)}, first=0),
        JournalRows({0: group(0, "leased", 0), 1: group(1, "queued")}, {0: lease(0, 0, 1)}, first=0, accounts=ACCOUNTS),
        JournalRows({0: group(0, "leased", 0), 1: group(1, "leased", 0, None)}, {0: lease(0, 0, 1)}, first=0, accounts=ACCOUNTS),
        JournalRows({0: group(0, "queued", place=None)}, first=0, accounts=ACCOUNTS),
        JournalRows({0: group(0, "queued")}, first=0, accounts=Accounts(Ledger())),
        JournalRows({0: group(0, "queued")}, first=0),
        JournalRows({}, first=0, accounts=Accounts(Ledger(started=4, skipped=4), skipped={"anomaly_loss": 4})),
        JournalRows(
            {n: group(n, "leased", 0) for n in (0, 1)},
            {0: replace(lease(0, 0, 1), committed=True, skipped="anomaly_loss")},
            first=0,
            accounts=Accounts(Ledger(started=4, skipped=4), skipped={"anomaly_age": 4}),
        ),
    ],
)
def test_rows_that_contradict_each_other_stop_the_run(recorded: JournalRows) -> None:
    with pytest.raises(InvariantBroken):
        recover(recorded, 0, 0, BATCH, "journal J")


def test_a_warm_up_that_is_trained_again_replays_all_of_what_came_after() -> None:
    recorded = JournalRows(
        {n: group(n, "leased", 10) for n in (0, 1)}, {10: lease(10, 0, 1)}, 10, 2, 3, Accounts(Ledger(started=4, leased=4))
    )
    found = recover(recorded, 4, 10, BATCH, "J")
    assert list(found.replays) == [10]
    assert found.lineage == 4
    assert found.accounts.ledger == Ledger(started=4, leased=4)
