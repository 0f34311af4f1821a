"""A queue whose trajectories lie in a real Redis server that is killed, stopped, emptied: nothing is trained twice, the counts add up."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.errors import AsyncmoeError, ConfigError, DataError, StorageError, UserError
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.start_order import Start
from asyncmoe.rollout.stored_groups import MARKER, StoredGroups, run_name
from asyncmoe.rpc import held
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Fetch
from asyncmoe.trajectory import decode, frames_in
from tests.redis_server import LocalRedis, needed, server
from tests.unit.test_journal import in_loop, opened
from tests.unit.test_queue_model import make_group
from tests.unit.test_rollout_workers import check
from tests.unit.worker_fleet import BATCH, SIZE, Cluster, configured

pytestmark = needed()
__all__ = ["server"]


def keys(server: LocalRedis) -> dict[str, int]:
    """Numbers of groups: in streams, and in hashes."""
    with server.client() as client:
        streams = sum(client.xlen(key) for key in client.scan_iter("asyncmoe:*:payloads"))
        return {"stream": streams, "hashes": len(list(client.scan_iter("asyncmoe:*:payload:*")))}


def stored(server: LocalRedis, **more: Any) -> dict[str, Any]:
    return {"payloads": "redis", "redis": server.url, "redis_patience_s": 20.0, **more}


def test_a_group_lies_in_the_store_alone_and_is_deleted_when_it_is_trained(tmp_path: Path, server: LocalRedis) -> None:
    async def run() -> None:
        async with Cluster(tmp_path, workers=2, engines=4, seed=1, **stored(server)) as cluster:
            for step in range(4):
                leased = await cluster.train(step)
                assert all(item.stored and item.holder for item in leased.items)
                assert not any(lent.worker._held._frames for lent in cluster.lent.values())
            check(cluster, 4)
            await asyncio.sleep(0.5)
            assert cluster.stored is not None
            trained = {one.stored for one in leased.items}
            assert not trained & cluster.stored._live
            assert keys(server)["hashes"] <= cluster.config.queue_capacity // SIZE
            with server.client() as client:
                assert not any(client.exists(name) for name in trained)
        with server.client() as client:
            assert list(client.scan_iter("asyncmoe:*")) == [], "nothing of the run is left"

    asyncio.run(run())


def test_a_lost_worker_takes_nothing_with_it_that_is_in_the_store(tmp_path: Path, server: LocalRedis, caplog: Any) -> None:
    async def run() -> None:
        async with Cluster(tmp_path, workers=2, engines=4, seed=2, **stored(server)) as cluster:
            leased = await cluster.queue.lease(0, "rl", BATCH, 0, 20.0)
            await cluster.lose(leased.items[0].holder)
            await cluster.train(0)
            assert "the controller is asked instead" not in caplog.text
            for step in range(1, 3):
                await cluster.train(step)
            check(cluster, 3)

    asyncio.run(run())


async def harm(own: LocalRedis, draw: random.Random) -> None:
    """Do one thing after another to a server, at random moments."""
    while True:
        await asyncio.sleep(draw.uniform(0.02, 0.3))
        what = draw.choice(["kill", "suspend", "empty", "delete", "exchange"])
        if what == "kill":
            await asyncio.to_thread(own.kill)
            await asyncio.sleep(draw.uniform(0, 0.2))
            await asyncio.to_thread(own.start)
        elif what == "suspend":
            own.signal(signal.SIGSTOP)
            await asyncio.sleep(draw.uniform(0, 0.3))
            own.signal(signal.SIGCONT)
        else:
            await asyncio.to_thread(damage, own, draw, what)


def damage(own: LocalRedis, draw: random.Random, what: str) -> None:
    with own.client() as client:
        groups = sorted(client.scan_iter("asyncmoe:*:payload:*"))
        if what == "empty":
            client.flushall()
        elif what == "delete" and groups:
            client.delete(draw.choice(groups))
        elif groups:
            client.copy(draw.choice(groups), draw.choice(groups), replace=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 12))])
def test_whatever_happens_to_the_server_nothing_is_trained_twice_and_the_counts_add_up(tmp_path: Path, seed: int) -> None:
    """Killed and started again without what it held, suspended, emptied, groups deleted or exchanged, workers lost; at random moments."""
    own = LocalRedis(tmp_path / "redis", {"maxmemory-policy": "noeviction"})
    draw = random.Random(seed)

    async def run() -> None:
        async with Cluster(tmp_path, workers=2, engines=4, seed=seed, **stored(own)) as cluster:
            harming = asyncio.create_task(harm(own, draw))
            try:
                for step in range(12):
                    if draw.random() < 0.15:
                        number = draw.choice(sorted(cluster.lent))
                        await cluster.lose(number)
                        while number in cluster.fleet.holders():
                            await asyncio.sleep(0.01)
                        await cluster.start(number)
                    await cluster.train(step)
            finally:
                harming.cancel()
                await asyncio.gather(harming, return_exceptions=True)
                own.signal(signal.SIGCONT)
                await asyncio.to_thread(lambda: own.close() or own.start())
            check(cluster, 12)

    try:
        asyncio.run(run())
    finally:
        own.signal(signal.SIGCONT)
        own.close()


@pytest.mark.parametrize(
    ("harm", "said", "kind"),
    [
        (lambda own: own.kill(), r"payloads: unix:.* did not answer for 1 s", StorageError),
        (lambda own: own.configure(maxmemory="1000000"), r"payloads: unix:.* is full .*raise its maxmemory", StorageError),
        (lambda own: own.configure(maxmemory_policy="allkeys-lru"), r"maxmemory-policy of unix:.*: got allkeys-lru", UserError),
    ],
    ids=["down", "full", "evicting"],
)
def test_a_server_that_stays_unusable_ends_the_run_with_one_line(
    tmp_path: Path, harm: Any, said: str, kind: type[AsyncmoeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncmoe.rollout import stored_groups

    monkeypatch.setattr(stored_groups, "_LOOKS_A_SWEEP", 1)
    own = LocalRedis(tmp_path / "redis", {"maxmemory-policy": "noeviction"})

    async def run() -> None:
        async with Cluster(tmp_path, workers=1, engines=4, seed=3, **stored(own, redis_patience_s=1.0, lease_timeout_s=1.0)) as cluster:
            await cluster.train(0)
            await asyncio.to_thread(harm, own)
            for step in range(1, 50):
                await cluster.train(step)

    try:
        with pytest.raises(kind, match=said) as failed:
            asyncio.run(run())
        assert "\n" not in str(failed.value)
    finally:
        own.close()


# ---------------------------------------------------------------- without rollout workers


def queue_of(groups: StoredGroups, **more: Any) -> BoundedQueue:
    return BoundedQueue(capacity=4 * SIZE, batch=BATCH, group_size=SIZE, max_staleness=9, keep=groups.keep, on_freed=groups.over, **more)


async def leased(queue: BoundedQueue) -> tuple[Any, dict[str, Any]]:
    """Put and lease a batch."""
    made = {one.key: one for number in range(BATCH // SIZE) for one in make_group(number, SIZE, [0, 0])}
    for number in range(BATCH // SIZE):
        queue.started(SIZE)
        queue._journal.begun(Start(number))
        await queue.put_group([made[f"g{number}.e{episode}"] for episode in range(SIZE)])
    return await queue.lease(0, "rl", BATCH, 0, 5.0), made


def test_the_controller_holds_no_frames_and_reads_what_is_gone_from_its_journal(tmp_path: Path, server: LocalRedis) -> None:
    config = configured(tmp_path, 0, 1, **stored(server))
    config.run.dir.mkdir()
    journal = opened(tmp_path / "run")
    journal.begin(0, 0, BATCH, 0)

    async def run() -> None:
        groups = await asyncio.to_thread(StoredGroups.open, config)
        assert groups is not None
        queue = queue_of(groups, journal=journal)
        answer, made = await leased(queue)
        wanted = tuple(item.key for item in answer.items)
        assert queue.fetch_ahead(wanted) is None
        assert not queue._lanes["rl"].frames(0)
        with server.client() as client:
            client.flushall()
        await queue.recall(0, wanted)
        frames, each = queue.fetch(0, wanted), frames_in(1)
        found = [decode(frames[n * each : (n + 1) * each]) for n in range(len(wanted))]
        assert [bytes(one.tokens.data) for one in found] == [bytes(made[key].tokens.data) for key in wanted]
        queue.commit(0)
        assert not groups._live
        await groups.close()

    in_loop(run())
    journal.close()


def test_a_server_that_does_not_answer_for_a_while_ends_no_run_that_has_nothing_to_put(
    tmp_path: Path, server: LocalRedis, caplog: Any
) -> None:
    config = configured(tmp_path, 0, 1, **stored(server, redis_patience_s=0.2))
    config.run.dir.mkdir()

    async def until(true: Callable[[], bool], looking: asyncio.Task[None]) -> None:
        while not true():
            assert not looking.done(), looking.exception()
            await asyncio.sleep(0.02)

    async def run() -> None:
        groups = await asyncio.to_thread(StoredGroups.open, config)
        assert groups is not None
        queue, looking = queue_of(groups), asyncio.create_task(groups.run())
        await leased(queue)
        server.signal(signal.SIGSTOP)
        try:
            queue.commit(0)
            await until(lambda: "stays in the store until it answers" in caplog.text, looking)
        finally:
            server.signal(signal.SIGCONT)
        await until(lambda: keys(server) == {"stream": 0, "hashes": 0}, looking)
        looking.cancel()
        await groups.close()
        assert caplog.text.count("stays in the store until it answers") == 1

    in_loop(run())


def test_what_is_being_put_at_the_end_leaves_nothing_in_the_store(
    tmp_path: Path, server: LocalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, 0, 1, **stored(server))
    config.run.dir.mkdir()
    entered, ended = threading.Event(), threading.Event()

    async def run() -> None:
        groups = await asyncio.to_thread(StoredGroups.open, config)
        assert groups is not None
        store: Any = groups._store
        write, end = store._write, store.end

        def slow(*arguments: Any) -> None:
            entered.set()
            ended.wait()
            write(*arguments)

        monkeypatch.setattr(store, "_write", slow)
        monkeypatch.setattr(store, "end", lambda: (end(), threading.Timer(0.2, ended.set).start()))
        putting = asyncio.create_task(leased(queue_of(groups)))
        await asyncio.to_thread(entered.wait)
        assert keys(server)["stream"] == 1
        await groups.close()
        assert keys(server) == {"stream": 0, "hashes": 0}
        with pytest.raises(StorageError, match="payloads: the run ends"):
            await putting

    in_loop(run())


def test_without_a_journal_what_is_gone_ends_the_run_with_one_line(tmp_path: Path, server: LocalRedis) -> None:
    config = configured(tmp_path, 0, 1, **stored(server))
    config.run.dir.mkdir()

    async def run() -> None:
        groups = await asyncio.to_thread(StoredGroups.open, config)
        assert groups is not None
        queue = queue_of(groups)
        answer, _ = await leased(queue)
        with pytest.raises(
            DataError, match=r"got no journal, expected one, because the rollout worker or the store that held it is lost"
        ) as failed:
            await queue.recall(0, [answer.items[0].key])
        assert "\n" not in str(failed.value)
        await groups.close()

    in_loop(run())


def test_the_run_has_one_name_in_its_store_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    name = run_name(tmp_path)
    assert run_name(tmp_path) == name == json.loads((tmp_path / MARKER).read_text())["run"]
    for damaged in ("", "{}", '{"run": "a:b", "inode": 1}', '{"run": 3, "inode": 1}', '{"run": "a"}', '{"run": "a", "inode": "1"}'):
        (tmp_path / MARKER).write_text(damaged)
        with pytest.raises(DataError, match=r"payloads\.json: got .*, expected the name of the run in its store; delete it"):
            run_name(tmp_path)


def test_a_copy_of_a_run_has_a_name_of_its_own_and_a_folder_that_was_moved_keeps_it(tmp_path: Path, caplog: Any) -> None:
    (run := tmp_path / "run").mkdir()
    name = run_name(run)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    moved = run.rename(tmp_path / "moved")
    assert run_name(moved) == name
    assert not caplog.text
    other = run_name(copy)
    assert run_name(copy) == other != name
    assert caplog.text.count(f"asyncmoe:{name}:*") == 1


def test_a_trajectory_in_a_store_that_the_run_has_not_is_refused(tmp_path: Path, server: LocalRedis) -> None:
    async def run() -> None:
        async with Cluster(tmp_path, workers=1, engines=4, seed=4, **stored(server)) as cluster:
            answer = await cluster.queue.lease(0, "rl", BATCH, 0, 20.0)
            cluster.config = configured(tmp_path, 1, 1)
            wanted = Fetch(0, tuple(item.key for item in answer.items))
            frames = await asyncio.to_thread(cluster.fetched, wanted, answer)  # read from the journal
            assert len(frames) == frames_in(len(wanted.keys))

    asyncio.run(run())


def test_a_rank_leaves_a_store_that_failed_alone_for_a_while_and_one_that_cannot_open_it_ends_the_run(
    tmp_path: Path, server: LocalRedis
) -> None:
    class Failing:
        asked = 0

        def get(self, asked: Any) -> Any:
            self.asked += 1
            raise StorageError("payloads: it did not answer")

        def close(self) -> None: ...

    def refuses() -> Any:
        raise ConfigError("queue.redis_password_variable", got="QUEUE_PASSWORD, which is not set", expected="a variable with the password")

    def fetch(client: Client, answer: Any) -> None:
        keys = tuple(item.key for item in answer.items)
        assert len(held.fetch(client, Fetch(0, keys), answer.items, answer.holders, 10.0)) == frames_in(len(keys))

    async def run() -> None:
        async with Cluster(tmp_path, workers=1, engines=4, seed=5, **stored(server)) as cluster:
            answer = await cluster.queue.lease(0, "rl", BATCH, 0, 20.0)
            failing = Failing()
            with Client(cluster._rendezvous, "trainer.0") as client:
                client.reads(lambda: failing)
                for _ in range(3):
                    await asyncio.to_thread(fetch, client, answer)
                assert failing.asked == 1
                client._rests_until = 0.0
                await asyncio.to_thread(fetch, client, answer)
                assert failing.asked == 2
            with Client(cluster._rendezvous, "trainer.0") as client:
                client.reads(refuses)
                with pytest.raises(ConfigError, match=r"queue\.redis_password_variable: got QUEUE_PASSWORD, which is not set"):
                    await asyncio.to_thread(fetch, client, answer)

    asyncio.run(run())
