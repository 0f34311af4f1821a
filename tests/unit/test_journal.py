"""A queue with a journal, stopped anywhere, goes on: what was finished is kept, what was leased is leased again, nothing ends twice."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from asyncmoe.errors import AsyncmoeError, DataError, StorageError, UserError
from asyncmoe.journal import belonging
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.journal import Journal
from asyncmoe.journal.rows import Change
from asyncmoe.journal.states import States
from asyncmoe.journal.states_file import FILE, StatesFile, network_file_system
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.replays import Resumption
from asyncmoe.queue.service import QueueService
from asyncmoe.queue.start_order import Start
from asyncmoe.rpc.messages import Commit, Leased
from asyncmoe.trajectory import decode, frames_in
from tests.disks import mounted
from tests.unit.test_queue_model import make_group

T = TypeVar("T")
OF = {"run.seed": "0", "task": "arithmetic 0123"}
SIZE, BATCH = 2, 4


@dataclass
class Life:
    """One process's journal and queue."""

    journal: Journal
    queue: BoundedQueue
    starts: Sequence[Start]
    next: int

    async def group(self, number: int, versions: Sequence[int] = (0, 0), attempt: int = 0) -> None:
        self.begin(number, attempt)
        await self.queue.put_group(make_group(number, SIZE, list(versions)))

    def begin(self, number: int, attempt: int = 0) -> None:
        self.queue.started(SIZE)
        self.journal.begun(Start(number, attempt))

    async def lease(self, step: int) -> Leased:
        return await self.queue.lease(step, "rl", BATCH, step, 5.0)


def opened(folder: Path, of: dict[str, str] = OF, max_bytes: int = 1 << 24) -> Journal:
    return Journal.open(folder / "journal", Belonging.of_run(folder, of), segment_bytes=1 << 12, max_bytes=max_bytes)


async def live(folder: Path, step: int = 0, **options: Any) -> Life:
    """Open the journal as a controller does whose trainer has taken `step` steps."""
    journal = opened(folder)
    found = journal.begin(step, 0, BATCH, step * BATCH // SIZE)
    queued = await journal.groups([group.number for group in found.queued])
    resumed = Resumption(found.accounts, queued, found.starts, found.arrivals, journal)
    held = BoundedQueue(
        capacity=4 * BATCH, batch=BATCH, group_size=SIZE, max_staleness=3, trained_steps=step, journal=journal, resumed=resumed, **options
    )
    return Life(journal, held, held.take_requeued(), found.next)


def in_loop(body: Coroutine[Any, Any, T], most_s: float = 20.0) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(most_s):
            return await body

    return asyncio.run(bounded())


def kill(life: Life, folder: Path, to: Path) -> Path:
    """What a kill leaves: the files as they are on disk."""
    life.journal._states.read(lambda connection: None)
    shutil.copytree(folder, to)
    return to


def test_everything_of_a_killed_run_goes_on(tmp_path: Path) -> None:
    async def first() -> tuple[Leased, dict[str, bytes]]:
        life = await live(tmp_path / "run")
        for number in (0, 2, 1, 3, 5, 4):
            await life.group(number, (0, 1) if number == 5 else (0, 0))
        life.begin(6)
        life.begin(7)
        await life.lease(0)
        life.queue.commit(0)
        life.queue.set_version(1)
        leased = await life.lease(1)
        frames = {item.key: b"".join(life.queue.fetch(1, [item.key])) for item in leased.items}
        life.queue.rejected(SIZE, "scorer_nan")
        life.journal.ended(6, "rejected", "scorer_nan")
        kill(life, tmp_path / "run", tmp_path / "again")
        life.journal.close()
        return leased, frames

    async def second(leased: Leased, frames: dict[str, bytes]) -> None:
        life = await live(tmp_path / "again", 1)
        assert life.starts == [Start(7)]
        assert life.next == 8
        ledger = life.queue.ledger
        assert (ledger.started, ledger.trained, ledger.leased, ledger.queued, ledger.rejected) == (16, 4, 4, 4, 2)
        assert life.queue.stats().requeued == {"restart": 2}
        again = [await life.lease(1) for _ in range(2)]
        assert again[0].items == leased.items == again[1].items
        assert (leased.lineage, again[0].lineage) == (0, 1)
        assert {item.key: b"".join(life.queue.fetch(1, [item.key])) for item in leased.items} == frames
        life.queue.commit(1)
        assert [item.group for item in (await life.lease(2)).items] == [5, 5, 4, 4]
        one = life.queue.fetch(2, ["g5.e0"])
        assert len(one) == frames_in(1)
        assert decode(one).group == 5
        assert (await live_error(tmp_path / "again")) is UserError
        life.journal.close()

    async def live_error(folder: Path) -> type[AsyncmoeError]:
        with pytest.raises(AsyncmoeError) as failed:
            opened(folder)
        assert "in use by another" in str(failed.value)
        return type(failed.value)

    in_loop(second(*in_loop(first())))


def test_no_decision_depends_on_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr("time.time", lambda: float(next(times)))

    async def body() -> None:
        life = await live(tmp_path / "run")
        for number in range(3):
            await life.group(number)
        await life.lease(0)
        kill(life, tmp_path / "run", tmp_path / "again")
        life.journal.close()
        again = await live(tmp_path / "again")
        assert [item.group for item in (await again.lease(0)).items] == [0, 0, 1, 1]
        assert again.queue.stats().depth == SIZE
        again.journal.close()

    in_loop(body())


def test_a_skipped_batch_stays_so_before_the_checkpoint_and_is_decided_anew_after_it(tmp_path: Path) -> None:
    """Killed before and after the replay: the ledger adds up each time, and no skip leaves it twice."""

    async def body() -> None:
        life = await live(tmp_path / "0")
        for step in range(3):
            for number in (2 * step, 2 * step + 1):
                await life.group(number, (step, step))
            await life.lease(step)
            life.queue.commit(step, ("anomaly_loss", "anomaly_age", "anomaly_loss")[step])
            life.queue.set_version(step + 1)
        for number in range(2):
            kill(life, tmp_path / str(number), tmp_path / str(number + 1))
            life.journal.close()
            life = await live(tmp_path / str(number + 1), 1)
            assert life.queue.stats().dropped == {"anomaly_loss": BATCH}
            ledger = life.queue.ledger
            assert (ledger.started, ledger.trained, ledger.skipped, ledger.leased) == (3 * BATCH, 0, BATCH, 2 * BATCH)
        for step, why in ((1, ""), (2, "anomaly_loss")):
            await life.lease(step)
            life.queue.commit(step, why)
        assert life.queue.stats().dropped == {"anomaly_loss": 2 * BATCH}
        kill(life, tmp_path / "2", tmp_path / "3")
        life.journal.close()
        last = await live(tmp_path / "3", 3)
        ledger = last.queue.ledger
        assert (ledger.started, ledger.trained, ledger.skipped, ledger.leased) == (3 * BATCH, BATCH, 2 * BATCH, 0)
        last.journal.close()

    in_loop(body())


def test_a_lease_is_answered_only_once_it_is_on_disk(tmp_path: Path) -> None:
    """The files at the moment of the answer hold the lease and the payloads."""

    async def body() -> None:
        life = await live(tmp_path / "run")
        for number in range(2):
            await life.group(number)
        leased = await life.lease(0)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")  # without waiting for anything
        life.journal.close()
        again = await live(tmp_path / "copy")
        assert again.queue.stats().leased == BATCH
        assert (await again.lease(0)).items == leased.items
        again.journal.close()

    in_loop(body())


def test_what_starts_again_comes_before_new_groups_and_in_order(tmp_path: Path) -> None:
    async def body() -> None:
        life = await live(tmp_path / "run", rule="requeue")
        await life.group(0)
        life.begin(1)
        life.begin(2)
        life.queue.rejected(SIZE, "engine_died")
        life.journal.again(Start(1, 1, 1), "engine_died")
        kill(life, tmp_path / "run", tmp_path / "again")
        life.journal.close()
        again = await live(tmp_path / "again")
        assert again.starts == [Start(2), Start(1, 1, 1)]
        assert again.next == 3
        again.begin(2)
        await again.queue.put_group(make_group(2, SIZE, [0, 0]))
        again.begin(1, 1)
        again.journal.close()

    in_loop(body())


@pytest.mark.parametrize(("rule", "state"), [("drop", []), ("requeue", [Start(0, 1)])])
def test_what_was_too_old_stays_so(tmp_path: Path, rule: Any, state: list[Start]) -> None:
    async def body() -> None:
        life = await live(tmp_path / "run", rule=rule)
        await life.group(0)
        life.queue.set_version(4)
        for number in (1, 2):
            await life.group(number, (4, 4))
        leased = await life.queue.lease(0, "rl", BATCH, 4, 5.0)
        assert {item.group for item in leased.items} == {1, 2}
        kill(life, tmp_path / "run", tmp_path / "again")
        life.journal.close()
        again = await live(tmp_path / "again", rule=rule)
        assert again.starts == state
        assert again.queue.stats().depth == 0
        assert getattr(again.queue.ledger, "dropped" if rule == "drop" else "requeued") == SIZE
        again.journal.close()

    in_loop(body())


def test_a_run_goes_back_to_an_older_checkpoint_and_no_further(tmp_path: Path) -> None:
    async def body() -> None:
        run = tmp_path / "run"
        life = await live(run)
        answers = []
        for step in range(4):
            for number in (2 * step, 2 * step + 1):
                await life.group(number, (step, step))
            answers.append(await life.lease(step))
            life.queue.commit(step)
            life.queue.set_version(step + 1)
        assert await life.journal.forget(2) > 0
        size = life.journal.size
        kill(life, run, tmp_path / "again")
        kill(life, run, tmp_path / "far")
        life.journal.close()
        again = await live(tmp_path / "again", 2)
        assert again.journal.size <= size + (1 << 12)
        for step in (2, 3):
            assert (await again.lease(step)).items == answers[step].items
            again.queue.commit(step)
        assert again.queue.ledger.trained == 4 * BATCH
        again.journal.close()
        far = opened(tmp_path / "far")
        with pytest.raises(DataError, match=r"got a journal of steps 2 to 4, expected step 1, .*; delete journal .*: what was queued"):
            far.begin(1, 0, BATCH, 0)
        with pytest.raises(DataError, match="expected step 5, where the checkpoint is"):
            far.begin(5, 0, BATCH, 0)
        far.close()

    in_loop(body())


def test_space_is_bounded(tmp_path: Path) -> None:
    async def body() -> None:
        life = await live(tmp_path / "run")
        sizes = []
        for step in range(60):
            for number in (2 * step, 2 * step + 1):
                await life.group(number, (step, step))
            await life.lease(step)
            life.queue.commit(step)
            life.queue.set_version(step + 1)
            if step % 5 == 4:
                await life.journal.forget(step - 4)
                sizes.append(life.journal.size)
        assert max(sizes) < 6 * (1 << 12)
        life.journal.close()

    in_loop(body())


def test_a_full_journal_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        life = await live(tmp_path / "run")
        life.journal.close()
        full = opened(tmp_path / "run", max_bytes=6000)
        life.journal = full
        full.begin(0, 0, BATCH, 0)
        held = BoundedQueue(capacity=64, batch=BATCH, group_size=SIZE, max_staleness=99, journal=full)
        put: list[int] = []

        async def fill() -> None:
            for number in range(50):
                held.started(SIZE)
                full.begun(Start(number))
                await held.put_group(make_group(number, SIZE, [0, 0]))
                put.append(number)

        with pytest.raises(StorageError, match=r"journal\.max_bytes") as failed:
            await fill()
        assert "\n" not in str(failed.value)
        full.close()
        again = opened(tmp_path / "run")
        assert len(again.begin(0, 0, BATCH, 0).queued) == len(put) > 0
        again.close()

    in_loop(body())


@pytest.mark.parametrize("of", [{**OF, "run.seed": "1"}, {**OF, "task": "jsonl 4567"}])
def test_a_journal_of_something_else_is_refused(tmp_path: Path, of: dict[str, str]) -> None:
    async def body() -> None:
        life = await live(tmp_path / "run")
        life.begin(0)
        life.journal.close()

    in_loop(body())
    key = next(key for key in OF if OF[key] != of[key])
    with pytest.raises(DataError, match=f"^{key}: got {of[key]}, expected {OF[key]}, as the journal .* has it; set it back, or delete .*"):
        opened(tmp_path / "run", of)


def test_a_journal_of_another_run_is_refused_and_a_moved_run_keeps_its_own(tmp_path: Path) -> None:
    async def body(folder: Path) -> None:
        life = await live(folder)
        life.begin(0)
        life.journal.close()

    in_loop(body(tmp_path / "one"))
    in_loop(body(tmp_path / "two"))
    (tmp_path / "one").rename(tmp_path / "moved")
    opened(tmp_path / "moved").close()
    shutil.rmtree(tmp_path / "moved" / "journal")
    shutil.copytree(tmp_path / "two" / "journal", tmp_path / "moved" / "journal")
    with pytest.raises(
        DataError, match=r"journal .*: got the journal of another run, expected this run's; name another journal.folder, or delete"
    ):
        opened(tmp_path / "moved")
    (tmp_path / "moved" / belonging.MARKER).write_text("{")
    with pytest.raises(DataError, match=r"journal\.json: got .*; delete it and the journal"):
        opened(tmp_path / "moved")


def test_a_journal_without_groups_belongs_to_anything(tmp_path: Path) -> None:
    opened(tmp_path).close()
    opened(tmp_path, {**OF, "run.seed": "1"}).close()
    assert not belonging.has_begun(tmp_path)


def test_a_deleted_journal_says_what_is_sampled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        life = await live(tmp_path)
        life.begin(0)
        life.journal.close()
        assert belonging.has_begun(tmp_path)
        shutil.rmtree(tmp_path / "journal")
        again = await live(tmp_path, 3)
        assert again.next == 6
        again.journal.close()

    in_loop(body())
    assert "is gone: what was queued or under way when the run stopped is sampled again" in caplog.text


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    opened(tmp_path).close()
    folder = tmp_path / "journal"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}


@pytest.mark.parametrize("damage", [b"no database at all" * 100, None])
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: bytes | None) -> None:
    async def body() -> None:
        life = await live(tmp_path)
        for number in range(40):
            life.journal.begun(Start(number))
        life.journal.close()

    in_loop(body())
    path = tmp_path / "journal" / FILE
    data = bytearray(path.read_bytes())
    data[5000:9000] = os.urandom(4000)
    path.write_bytes(data if damage is None else damage)
    with pytest.raises((DataError, StorageError)) as failed:
        opened(tmp_path)
    assert "\n" not in str(failed.value)


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockless(file: StatesFile) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_LOCK"
        raise error

    monkeypatch.setattr(StatesFile, "connect", lockless)
    with pytest.raises(
        UserError, match=r"journal\.folder: got .*journal, on a file system without locks, expected a folder on a local disk"
    ):
        opened(tmp_path)


def test_another_programs_file_is_one_line_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir(mode=0o700)
    with closing(sqlite3.connect(folder / FILE)) as connection:
        connection.execute("CREATE TABLE facts (other INTEGER)")
    with pytest.raises(DataError, match=r"states\.sqlite: got no such column.*, expected a whole journal; delete"):
        opened(tmp_path)
    assert (folder / FILE).stat().st_size > 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(StorageError, match=r"the journal: cannot write .*journal"):
        opened(tmp_path)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    async def fill(life: Life, put: list[int]) -> None:
        for number in range(4000):
            life.begin(number)
            await life.queue.put_group(make_group(number, SIZE, [life.queue.version] * 2))
            put.append(number)
            if number % 2:
                await life.lease(number // 2)
                life.queue.commit(number // 2)
                life.queue.set_version(number // 2 + 1)

    async def body(disk: Path) -> None:
        life, put = await live(disk / "run"), list[int]()
        with pytest.raises(StorageError, match=r"journal.*(ENOSPC|No space).*make room there") as failed:
            await fill(life, put)
        assert "\n" not in str(failed.value)
        with suppress(StorageError):
            life.journal.close()
        (disk / "ballast").unlink()
        again = await live(disk / "run")
        known = again.journal.recorded
        assert known.next >= len(put) > 0
        assert all(known.groups[number].place is not None for number in put)
        assert len(known.leases) >= len(put) // 2
        again.journal.close()

    with mounted(tmp_path / "disk", "2m") as disk:
        (disk / "ballast").write_bytes(bytes(1 << 20))
        in_loop(body(disk))


def test_network_file_systems_are_known(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path}/shared nfs4 rw 0 0\n")
    (tmp_path / "shared").mkdir()
    assert network_file_system(tmp_path / "shared" / "run", mounts) == "nfs4"
    assert network_file_system(tmp_path, mounts) is None
    assert network_file_system(tmp_path, tmp_path / "absent") is None


def test_one_wait_for_the_disk_serves_the_commits_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, may_keep = StatesFile.keep, threading.Event()
    ask, waits = States.ask, list[Callable[..., Any]]()

    def slow(store: StatesFile, changes: Sequence[Change]) -> None:
        assert may_keep.wait(10.0)
        keep(store, changes)

    def counted(states: States, question: Callable[..., Any]) -> Awaitable[Any]:
        waits.append(question)
        return ask(states, question)

    async def body() -> None:
        life = await live(tmp_path / "run")
        service = QueueService(life.queue, run="run", config_digest="")
        await life.group(0)
        await life.group(1)
        await life.lease(0)
        monkeypatch.setattr(StatesFile, "keep", slow)
        monkeypatch.setattr(States, "ask", counted)
        ranks = [asyncio.create_task(service(Commit(0))) for _ in range(4)]
        done, _ = await asyncio.wait(ranks, timeout=0.2)
        assert not done, "the commit is not on disk"
        life.begin(2)
        may_keep.set()
        await asyncio.gather(*ranks)
        life.begin(3)
        await service(Commit(0))
        assert len(waits) == 1
        life.journal.close()

    in_loop(body())
