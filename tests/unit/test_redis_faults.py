"""A journal in a real Redis server that fails, is full, loses what it had, or is used by another controller."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.errors import AsyncmoeError, DataError, StorageError, UserError
from asyncmoe.journal import rows
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.journal import Journal
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.start_order import Start
from tests.redis_server import LocalRedis, needed, server
from tests.unit.doc_pages import ROOT
from tests.unit.redis_journals import RedisJournals
from tests.unit.test_journal import BATCH, OF, SIZE, in_loop
from tests.unit.test_queue_model import make_group

pytestmark = needed()
__all__ = ["server"]


@pytest.fixture
def journals(server: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisJournals]:
    from asyncmoe.journal.in_redis import hold

    monkeypatch.setattr(hold, "_BEAT_S", 0.1)
    yield RedisJournals(server)
    with server.client() as client:
        client.flushall()


def begun(journals: RedisJournals, folder: Path, **more: Any) -> tuple[Journal, BoundedQueue]:
    from asyncmoe.journal.in_redis import opening

    folder.mkdir(exist_ok=True)
    journal = opening.open_journal(journals.section(folder, **more), Belonging.of_run(folder, OF))
    journal.begin(0, 0, BATCH, 0)
    return journal, BoundedQueue(capacity=1 << 12, batch=BATCH, group_size=SIZE, max_staleness=1 << 20, journal=journal)


async def put(journal: Journal, queue: BoundedQueue, number: int) -> None:
    queue.started(SIZE)
    journal.begun(Start(number))
    await queue.put_group(make_group(number, SIZE, [0, 0]))


def ends(journal: Journal, queue: BoundedQueue, then: Callable[[], None] = lambda: None) -> tuple[str, int]:
    """Put groups, do something after the third, and put groups until the journal fails; return its line, and the number of groups."""
    count = 0

    async def body() -> None:
        nonlocal count
        while True:
            await put(journal, queue, count)
            count += 1
            if count == 3:
                await asyncio.to_thread(then)

    with pytest.raises((StorageError, UserError)) as failed:
        in_loop(body())
    with suppress(AsyncmoeError):
        journal.close()
    assert "\n" not in str(failed.value)
    return str(failed.value), count


def kept(journals: RedisJournals, folder: Path) -> list[int]:
    """Groups that an opened journal has queued; each payload is read."""
    with closing(journals.opened(folder, OF)) as journal:
        numbers = [group.number for group in journal.recorded.groups.values() if group.state == "queued"]
        found = in_loop(journal.groups(numbers))
    assert [group.number for group in found] == numbers
    return numbers


# ---------------------------------------------------------------- before a run


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("appendonly", "no", "yes"),
        ("appendfsync", "everysec", "always"),
        ("no_appendfsync_on_rewrite", "yes", "no"),
        ("maxmemory_policy", "allkeys-lru", "noeviction"),
    ],
)
def test_a_server_that_may_lose_entries_is_refused(
    journals: RedisJournals, tmp_path: Path, setting: str, value: str, expected: str
) -> None:
    said = f"journal.redis: {setting.replace('_', '-')} of unix:.*: got {value}, expected {expected}; "
    journals.server.configure(**{setting: value})
    try:
        with pytest.raises(UserError, match=said) as failed:
            begun(journals, tmp_path / "run")
        assert "\n" not in str(failed.value)
    finally:
        journals.server.configure(**{setting: expected})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "6.0.16"}, "journal.redis: got Redis 6.0.16 at here, expected 6.2 or later"),
        ({"version": ""}, "journal.redis: got Redis of no known version at here"),
        ({"mode": "cluster"}, "journal.redis: got here, a Redis in mode cluster, expected a single server"),
        ({"role": "slave"}, "journal.redis: got here, a replica, expected a server that can be written; name its master"),
    ],
)
def test_a_server_of_another_kind_is_refused(server: LocalRedis, change: dict[str, str], said: str) -> None:
    from dataclasses import replace

    from asyncmoe.journal.in_redis import settings

    with server.client() as client:
        found = settings.read(client)
    settings.check(found, "here")
    with pytest.raises(UserError, match=said):
        settings.check(replace(found, **change), "here")


def test_a_server_that_does_not_answer_is_refused(journals: RedisJournals, tmp_path: Path) -> None:
    from asyncmoe.config.journal import JournalSection
    from asyncmoe.journal.in_redis import opening

    for url in (f"unix://{tmp_path}/absent", "redis://127.0.0.1:1"):
        with pytest.raises(UserError, match=rf"journal.redis: got {url}: .*, expected a Redis server that answers; start it"):
            opening.server_of(JournalSection(redis=url))


def test_a_password_is_in_a_variable(journals: RedisJournals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journals.server.configure(requirepass="right")
    try:
        for password, variable, said in (
            (None, None, "journal.redis: got .* at unix:.*, expected the password of the server; set the variable"),
            ("wrong", "SECRET", "journal.redis: got .* at unix:.*, expected the password of the server; set the variable"),
            (None, "SECRET", "journal.redis_password_variable: got SECRET, which is not set, expected a variable with the password"),
            ("right", "SECRET", None),
        ):
            monkeypatch.delenv("SECRET", raising=False)
            if password is not None:
                monkeypatch.setenv("SECRET", password)
            if said is None:
                begun(journals, tmp_path / "run", redis_password_variable=variable)[0].close()
                continue
            with pytest.raises(UserError, match=said) as failed:
                begun(journals, tmp_path / "run", redis_password_variable=variable)
            assert "wrong" not in str(failed.value).replace("wrong number", "").replace("wrong pass", "").lower() or password != "wrong"
    finally:
        with journals.server.client(password="right") as client:
            client.config_set("requirepass", "")


def test_a_user_who_may_too_little_is_refused(journals: RedisJournals, tmp_path: Path) -> None:
    from asyncmoe.config.journal import JournalSection
    from asyncmoe.journal.in_redis import opening

    with journals.server.client() as client:
        client.execute_command("ACL", "SETUSER", "small", "on", "nopass", "~asyncmoe:*", "+@all", "-config")
    url = f"{journals.server.url}?username=small&db=9"
    with pytest.raises(UserError, match=r"journal.redis: got .*permission.*, expected a user who may do it; docs/guides/journal.md"):
        opening.server_of(JournalSection(redis=url))


@pytest.mark.parametrize(
    "address", ["http://h:1", "redis://", "redis://h:x", "redis://:secret@h", "redis://h?password=secret", "unix://", "h:6379"]
)
def test_an_address_of_no_server_or_with_a_password_is_refused(address: str) -> None:
    from asyncmoe.config.journal import JournalSection

    with pytest.raises(ValueError, match=r"journal\.redis: got .*, expected ") as failed:
        JournalSection(redis=address)
    assert "without; journal.redis_password_variable" in str(failed.value) or "secret" not in address


# ---------------------------------------------------------------- one controller


def child(journals: RedisJournals, folder: Path, seed: int = 0) -> subprocess.Popen[str]:
    """A controller that puts, leases and commits in a process of its own; it says what was acknowledged, a line each."""
    section = journals.section(folder)
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.unit.redis_journals", section.model_dump_json(), str(folder), str(seed)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with folder.with_suffix(".stderr").open("ab") as errors:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)


def said(process: subprocess.Popen[str], lines: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(lines)]


def rest_of(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    with process.stdout:
        lines = process.stdout.read().splitlines()
    process.wait(20)
    return lines


def test_a_second_controller_is_refused_unless_the_first_is_suspended_which_then_writes_nothing_more(
    journals: RedisJournals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncmoe.journal.in_redis import hold

    first = child(journals, tmp_path / "run")
    said(first, 5)
    with pytest.raises(UserError, match=rf"journal: got unix:.*, in use by another controller \(process {first.pid} on .*\), expected one"):
        begun(journals, tmp_path / "run")
    assert first.poll() is None
    first.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(hold, "_SILENT_S", 2)
    second = journals.opened(tmp_path / "run", OF)
    before = second._states.read(rows.read)
    first.send_signal(signal.SIGCONT)
    assert "in use by another controller" in rest_of(first)[-1]
    assert first.returncode == 2
    assert second._states.read(rows.read) == before
    second._states.write([rows.fact("lineage", 1)])
    assert second._states.read(rows.read).lineage == 1
    second.close()


# ---------------------------------------------------------------- while it runs


def test_a_full_server_is_one_line_and_loses_nothing(journals: RedisJournals, tmp_path: Path) -> None:
    journal, queue = begun(journals, tmp_path / "run")

    def fill() -> None:
        with journals.server.client() as client:
            client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + (64 << 10))

    try:
        line, count = ends(journal, queue, fill)
    finally:
        journals.server.configure(maxmemory="0")
    assert "journal: unix:" in line
    assert "is full" in line
    assert "raise its maxmemory" in line
    assert set(kept(journals, tmp_path / "run")) >= set(range(count))


def test_a_server_that_is_gone_is_one_line_and_loses_nothing(journals: RedisJournals, tmp_path: Path) -> None:
    journal, queue = begun(journals, tmp_path / "run", redis_patience_s=0.5)
    line, count = ends(journal, queue, journals.server.kill)
    assert "did not answer for 0.5 s" in line
    assert "what was acknowledged is not lost" in line
    journals.server.start()
    assert set(kept(journals, tmp_path / "run")) >= set(range(count))


def test_a_server_that_hangs_is_one_line(journals: RedisJournals, tmp_path: Path) -> None:
    journal, queue = begun(journals, tmp_path / "run", redis_patience_s=0.5)
    try:
        line, _ = ends(journal, queue, lambda: journals.server.signal(signal.SIGSTOP))
    finally:
        journals.server.signal(signal.SIGCONT)
    assert "did not answer for 0.5 s (Timeout" in line


def test_a_server_that_became_a_replica_is_one_line(journals: RedisJournals, tmp_path: Path) -> None:
    journal, queue = begun(journals, tmp_path / "run", redis_patience_s=0.5)

    def demote() -> None:
        with journals.server.client() as client:
            client.replicaof("127.0.0.1", "1")

    try:
        line, count = ends(journal, queue, demote)
    finally:
        with journals.server.client() as client:
            client.replicaof("NO", "ONE")
    assert "has become a replica" in line
    assert set(kept(journals, tmp_path / "run")) >= set(range(count))


def test_an_answer_that_another_thread_waits_for_survives_a_refused_write(journals: RedisJournals) -> None:
    from asyncmoe.journal.in_redis.server import RedisServer

    server, asked = RedisServer(journals.server.url, None, 1.5), threading.Semaphore(0)

    def wait(client: Any) -> Any:
        asked.release()
        return client.xread({"nothing": "$"}, block=500)

    with journals.server.client() as client:
        client.replicaof("127.0.0.1", "1")
    try:
        with ThreadPoolExecutor() as pool, closing(server):
            answer = pool.submit(server.call, wait)
            assert asked.acquire(timeout=10.0)
            with pytest.raises(StorageError, match="has become a replica"):
                server.call(lambda client: client.hset("key", "field", "value"))
            assert not answer.result(10.0)
    finally:
        with journals.server.client() as client:
            client.replicaof("NO", "ONE")
    assert not asked.acquire(blocking=False), "the request was sent again"


def test_a_setting_that_is_changed_during_a_run_ends_it(journals: RedisJournals, tmp_path: Path) -> None:
    journal, queue = begun(journals, tmp_path / "run")
    try:
        line, _ = ends(journal, queue, lambda: journals.server.configure(appendfsync="everysec"))
    finally:
        journals.server.configure(appendfsync="always")
    assert "journal.redis: appendfsync of unix:" in line
    assert "got everysec, expected always" in line


def test_keys_that_are_deleted_during_a_run_end_it(journals: RedisJournals, tmp_path: Path) -> None:
    journal, queue = begun(journals, tmp_path / "run")

    def delete() -> None:
        with journals.server.client() as client:
            client.flushall()

    line, _ = ends(journal, queue, delete)
    assert "no longer has its keys asyncmoe:" in line


def test_a_server_that_went_back_in_time_ends_the_run(journals: RedisJournals, tmp_path: Path) -> None:
    journal, queue = begun(journals, tmp_path / "run")

    def back() -> None:
        with journals.server.client(journals.number(tmp_path / "run")) as client:
            client.hincrby(client.keys("*:state")[0], "entry", -2)

    line, _ = ends(journal, queue, back)
    assert "it has lost entries that it had acknowledged" in line


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 12))])
def test_what_was_acknowledged_is_there_after_kills_of_controllers_and_server(
    journals: RedisJournals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from asyncmoe.journal.in_redis import hold

    draw, over, told = random.Random(seed), threading.Event(), list[str]()
    (tmp_path / "run").mkdir()
    Belonging.of_run(tmp_path / "run", OF).note(begun=True)  # a run that goes on waits for a server that does not answer
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(journals.killed_and_restarted, random.Random(seed), over)
        try:
            for number in range(2):
                process = child(journals, tmp_path / "run", seed + number)
                told += said(process, 3)
                time.sleep(draw.uniform(0.1, 0.6))
                process.kill()
                told += rest_of(process)
        finally:
            over.set()
    assert killing.result() > 1
    assert not [line for line in told if not line.startswith(("queued", "leased", "forgot"))], told[-3:]
    monkeypatch.setattr(hold, "_SILENT_S", 1 << 30)  # no time-out lets in who comes after a kill
    check_acknowledged(journals.opened(tmp_path / "run", OF), told)


def check_acknowledged(journal: Journal, told: list[str]) -> None:
    recorded = journal.recorded
    floor = recorded.first or 0
    assert floor >= max((int(line.split()[1]) for line in told if line.startswith("forgot")), default=0)
    leases: dict[int, list[int]] = {}
    for line in told:
        word, *numbers = line.split()
        if word == "leased":
            step, *groups = map(int, numbers)
            assert leases.setdefault(step, groups) == groups, "a step is answered as it was"
            assert step < floor or [one.number for one in recorded.leases[step].groups] == groups
    once = [number for groups in leases.values() for number in groups]
    assert len(once) == len(set(once)), "a group is leased once"
    queued = {int(line.split()[1]) for line in told if line.startswith("queued")}
    assert queued <= set(recorded.groups) | {number for step, groups in leases.items() if step < floor for number in groups}
    numbers = [number for number in queued if number in recorded.groups]
    assert all(recorded.groups[number].state in ("queued", "leased") for number in numbers)
    assert [group.number for group in in_loop(journal.groups(numbers))] == numbers
    journal.close()
    assert queued


# ---------------------------------------------------------------- damage


def test_damage_is_one_line_that_names_the_key(journals: RedisJournals, tmp_path: Path) -> None:
    journal, queue = begun(journals, tmp_path / "run")

    async def fill() -> None:
        for number in range(4):
            await put(journal, queue, number)

    in_loop(fill())
    journal.close()
    database = journals.number(tmp_path / "run")
    with journals.server.client(database) as client:
        entries, groups = (client.keys(f"*:{name}")[0].decode() for name in ("entries", "groups"))
        last, _ = client.xrevrange(entries, count=1)[0]
        field, payload = next(iter(client.hgetall(groups).items()))

        def refused(said: str) -> None:
            with pytest.raises(DataError, match=said) as failed:
                kept(journals, tmp_path / "run")
            assert "\n" not in str(failed.value)

        client.hset(groups, field, payload[:-1] + bytes([payload[-1] ^ 1]))
        refused(f"{groups} {field.decode()}: got a wrong checksum, expected what the journal wrote")
        client.hset(groups, field, payload[:-1])
        refused(f"{groups} {field.decode()}: got {len(payload) - 1} bytes, expected a payload's {len(payload)} bytes")
        client.hdel(groups, field)
        refused(f"{groups} {field.decode()}: got nothing")
        client.xdel(entries, last)
        refused(r"got entries up to \d+, expected the entries up to \d+; delete its keys asyncmoe:")


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (b"\x91\x92\xa5other\x90", "key 7: got the change 'other', expected changes that this version knows"),
        (b"\xc0", "key 7: got Expected `array`, got `None`"),
    ],
)
def test_an_entry_that_this_version_does_not_know_is_refused(packed: bytes, said: str) -> None:
    from asyncmoe.journal.in_redis import entries

    with pytest.raises(DataError, match=said):
        entries.unpack(entries.seal([packed], "key 7"), "key 7")
    for data, what in ((entries.seal([packed], "key 8"), "got a wrong checksum"), (b"ab", "got 2 bytes"), (None, "got nothing")):
        with pytest.raises(DataError, match=f"key 7: {what}, expected what the journal wrote"):
            entries.unpack(data, "key 7")
