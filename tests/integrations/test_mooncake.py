"""Trajectories in Mooncake's store: its package and a real master, over TCP on this machine."""

from __future__ import annotations

import asyncio
import ctypes
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("mooncake") is None:
    pytest.skip("run: make test-integrations ONLY=mooncake", allow_module_level=True)
try:
    ctypes.CDLL("libibverbs.so.1")
except OSError as missing:
    pytest.skip(f"{missing}: install libibverbs (libibverbs1 of Debian)", allow_module_level=True)

from asyncmoe.config.queue import QueueSection
from asyncmoe.errors import ConfigError, DataError, StorageError
from asyncmoe.payloads import mooncake_layout as layout
from asyncmoe.payloads import opening
from asyncmoe.payloads.in_mooncake import MooncakeGroups
from asyncmoe.payloads.packed import Asked
from asyncmoe.trajectory import Buffer, encode, part
from tests.unit.test_packed import trajectory

KEYS = ("g0.e0", "g0.e1")
FRAMES = {key: encode(trajectory(20, seed, True, True)) for seed, key in enumerate(KEYS)}
MEGABYTE = 1 << 20
SEGMENT = 64 * MEGABYTE


class Master:
    """`mooncake_master` on ports of its own, which can be killed and started again."""

    def __init__(self, log: Path) -> None:
        self._log, (self._port, self._admin) = log, _free(2)
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        package = find_spec("mooncake")
        assert package is not None
        program = Path((package.submodule_search_locations or [""])[0]) / "mooncake_master"
        command = [str(program), f"--rpc_port={self._port}", "--rpc_address=127.0.0.1", "--client_ttl=5"]
        admin = [f"--metrics_port={self._admin}", "--metrics_host=127.0.0.1", "--enable_http_metadata_server=false"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, *admin], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 2.0).close()
                return
            except OSError:
                assert self._process.poll() is None, self._log.read_text()[-2000:]
                assert time.monotonic() < until, "mooncake_master did not answer"
                time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)


def _free(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    one = Master(tmp_path_factory.mktemp("mooncake") / "log")
    yield one
    one.kill()


def queue(master: Master, *, patience_s: float = 20.0, segment_bytes: int = SEGMENT, **more: Any) -> dict[str, Any]:
    section = {"master": master.address, "patience_s": patience_s, "segment_bytes": segment_bytes}
    return {"payloads": "mooncake", "mooncake": section, **more}


@pytest.fixture
def store(master: Master) -> Iterator[MooncakeGroups]:
    one = opened(master)
    yield one
    one._client.remove_matching("^asyncmoe:")
    one.close()


def opened(master: Master, *, writes: bool = True, **more: Any) -> Any:
    return opening.open_store(QueueSection(**queue(master, **{"lease_timeout_s": 5.0, **more})), writes=writes)


def same(found: list[Buffer] | DataError, expected: list[Buffer]) -> bool:
    assert not isinstance(found, DataError), found
    return [bytes(one) for one in found] == [bytes(one) for one in expected]


def wide(seed: int, nbytes: int = MEGABYTE) -> dict[str, list[Buffer]]:
    """A group of about `nbytes`, none of which repeats."""
    draw = random.Random(seed)
    frames = list(FRAMES[KEYS[0]])
    return {KEYS[0]: [*frames[:-1], draw.randbytes(nbytes)]}


def test_what_was_put_is_read_by_another_process_s_client_until_it_is_deleted(master: Master, store: MooncakeGroups) -> None:
    prefix, reader = store.begin("run1"), opened(master, writes=False)
    names = [f"{prefix}w.{number}" for number in range(3)]
    for name in names:
        store.put(name, FRAMES)
        store.put(name, FRAMES)
    asked = [Asked(name, key, (1, 4), False) for name in names for key in KEYS]
    assert all(same(one, part(FRAMES[each.key], (1, 4), False)) for one, each in zip(reader.get(asked), asked, strict=True))
    store.delete([names[0], names[0], f"{prefix}w.9"])
    gone, there = reader.get([Asked(names[0], KEYS[0]), Asked(names[1], KEYS[1])])
    assert str(gone).startswith(f"payload {names[0]}: got nothing")
    assert same(there, FRAMES[KEYS[1]])
    other = store.begin("run2")
    store.put(f"{other}w.0", FRAMES)
    store.begin("run1")
    assert same(reader.get([Asked(f"{other}w.0", KEYS[0])])[0], FRAMES[KEYS[0]]), "another run's groups are left alone"
    assert isinstance(reader.get([Asked(names[1], KEYS[0])])[0], DataError), "what an earlier controller left is deleted"
    store.clear(other)
    assert isinstance(reader.get([Asked(f"{other}w.0", KEYS[0])])[0], DataError)
    reader.close()


def test_a_group_of_several_objects_comes_out_whole(store: MooncakeGroups) -> None:
    name, frames = f"{store.begin('run1')}w.0", wide(1, 2 * layout.OBJECT_BYTES + 12345)
    store.put(name, frames)
    assert same(store.get([Asked(name, KEYS[0])])[0], frames[KEYS[0]])
    assert same(store.get([Asked(name, KEYS[0], (3,), False)])[0], part(frames[KEYS[0]], (3,), False))


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except StorageError as error:
        return str(error)
    return ""


def test_a_full_store_refuses_a_group_and_keeps_all_that_it_took(master: Master, store: MooncakeGroups) -> None:
    prefix, put, said = store.begin("run1"), 0, ""
    while not (said := refusal(partial(store.put, f"{prefix}w.{put}", wide(put), until=time.monotonic() + 1))):
        put += 1
    assert re.match(r"payloads: Mooncake at 127.* is full; nothing was freed for 5 s .*lower queue\.capacity", said)
    assert SEGMENT // MEGABYTE // 2 < put < SEGMENT // MEGABYTE
    time.sleep(3)  # what a store drops it may drop later
    for number in range(put):
        assert same(store.get([Asked(f"{prefix}w.{number}", KEYS[0])])[0], wide(number)[KEYS[0]]), number
    assert isinstance(store.get([Asked(f"{prefix}w.{put}", KEYS[0])])[0], DataError)
    store.delete([f"{prefix}w.{number}" for number in range(3)])
    store.put(f"{prefix}w.{put}", wide(put))
    assert same(store.get([Asked(f"{prefix}w.{put}", KEYS[0])])[0], wide(put)[KEYS[0]])


def test_a_killed_or_stopped_master_is_named_in_time_and_one_that_comes_back_is_used(master: Master) -> None:
    store = opened(master, patience_s=2.0)
    prefix = store.begin("run1")
    store.put(f"{prefix}w.0", FRAMES)
    master.kill()
    calls = (
        partial(store.put, f"{prefix}w.1", FRAMES),
        partial(store.get, [Asked(f"{prefix}w.0", KEYS[0])]),
        partial(store.delete, [f"{prefix}w.0"]),
        partial(store.sweep, prefix, ()),
    )
    for call in calls:
        with pytest.raises(StorageError, match=r"payloads: Mooncake at 127.* did not answer for 2 s; bring the master back"):
            call()
    master.start()
    until = time.monotonic() + 60
    while said := refusal(partial(store.put, f"{prefix}w.2", FRAMES)):
        assert time.monotonic() < until, said
    assert same(store.get([Asked(f"{prefix}w.2", KEYS[1])])[0], FRAMES[KEYS[1]])
    lost = store.get([Asked(f"{prefix}w.0", KEYS[0])])[0]
    assert isinstance(lost, DataError), "the new master knows nothing of what the other one had"
    master.signal(signal.SIGSTOP)
    try:
        with pytest.raises(StorageError, match="did not answer for 2 s"):
            store.put(f"{prefix}w.3", FRAMES)
    finally:
        master.signal(signal.SIGCONT)
    store.clear(prefix)
    store.close()


HARM = {
    "index gone": (lambda raw, one, other: raw.remove(layout.index_key(one), True), "got nothing"),
    "index of another group": (lambda raw, one, other: exchange(raw, layout.index_key(one), raw.get(layout.index_key(other))), "checksum"),
    "index short": (lambda raw, one, other: exchange(raw, layout.index_key(one), b"xyz"), "got 3 bytes"),
    "bytes gone": (lambda raw, one, other: raw.remove(f"{one}:0", True), "got nothing"),
    "bytes of another group": (lambda raw, one, other: exchange(raw, f"{one}:0", raw.get(f"{other}:0")), "got a wrong checksum"),
    "bytes short": (lambda raw, one, other: exchange(raw, f"{one}:0", raw.get(f"{one}:0")[:10]), "got Mooncake's error -600"),
}


def exchange(raw: Any, key: str, data: bytes) -> None:
    assert raw.remove(key, True) == 0
    assert raw.put(key, data) == 0


@pytest.mark.parametrize("what", HARM)
def test_what_is_gone_short_or_another_s_is_named_and_the_rest_is_read(store: MooncakeGroups, what: str) -> None:
    harm, said = HARM[what]
    prefix = store.begin("run1")
    one, other = f"{prefix}w.0", f"{prefix}w.1"
    store.put(one, {**FRAMES})
    store.put(other, {KEYS[0]: FRAMES[KEYS[1]], KEYS[1]: FRAMES[KEYS[0]]})
    harm(store._client._store, one, other)
    wrong, right = store.get([Asked(one, KEYS[0]), Asked(other, KEYS[0])])
    assert isinstance(wrong, DataError)
    assert said in str(wrong)
    assert one in str(wrong)
    assert "\n" not in str(wrong)
    assert same(right, FRAMES[KEYS[1]])
    store.delete([one])
    assert store._client.remove_matching(f"^{one}:".replace(".", r"\.")) == 0, "nothing of a damaged group stays"


GIVES = """
import sys, time
from asyncmoe.config.queue import QueueSection
from asyncmoe.payloads.opening import open_store
from tests.integrations.test_mooncake import FRAMES
store = open_store(QueueSection.model_validate_json(sys.argv[1]), writes=True)
store.put(sys.argv[2], FRAMES)
print("put", flush=True)
time.sleep(600)
"""


def test_what_lay_in_memory_of_a_killed_process_is_missed_in_time(tmp_path: Path) -> None:
    own = Master(tmp_path / "log")
    section = QueueSection(**queue(own)).model_dump_json()
    name = "asyncmoe:run1:s.w.0"
    giver = subprocess.Popen([sys.executable, "-c", GIVES, section, name], stdout=subprocess.PIPE)
    try:
        assert giver.stdout is not None
        assert giver.stdout.readline() == b"put\n"
        reader = opened(own, writes=False)
        assert same(reader.get([Asked(name, KEYS[0])])[0], FRAMES[KEYS[0]])
        giver.kill()
        giver.wait(20)
        for _ in range(3):
            lost = reader.get([Asked(name, KEYS[0])])[0]
            assert isinstance(lost, DataError)
            time.sleep(4)
        reader.close()
    finally:
        giver.kill()
        giver.wait(20)
        own.kill()


def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(master: Master) -> None:
    nowhere = QueueSection(payloads="mooncake", mooncake={"master": f"127.0.0.1:{_free(1)[0]}"})  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"^queue\.mooncake\.master: got 127.*: Connection refused, expected a master that answers"
    ) as said:
        opening.check(nowhere)
    assert "\n" not in str(said.value)
    with pytest.raises(ConfigError, match=r"^queue\.mooncake: got a store at 127.* without room, expected one with memory; set .*segment"):
        opening.check(QueueSection(**queue(master, segment_bytes=0)))
    opening.check(QueueSection(**queue(master)))


# ---------------------------------------------------------------- queue and workers


def test_a_queue_in_the_store_outlives_its_master_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    """Two workers, real sockets, queue and journal; the master is killed, and comes back without what it knew."""
    from tests.unit.test_rollout_workers import check
    from tests.unit.worker_fleet import Cluster

    own = Master(tmp_path / "log")

    async def run() -> None:
        async with Cluster(tmp_path, workers=2, engines=4, seed=1, **queue(own, patience_s=30.0)) as cluster:
            for step in range(8):
                if step in (3, 6):
                    await asyncio.to_thread(own.kill)
                    await asyncio.to_thread(own.start)
                leased = await cluster.train(step)
                assert all(item.stored and item.holder for item in leased.items)
            check(cluster, 8)
        left = await asyncio.to_thread(opened, own, writes=False)
        assert left._client.remove_matching("^asyncmoe:") == 0, "nothing of the run is left"
        left.close()

    try:
        asyncio.run(run())
    finally:
        own.kill()


# ---------------------------------------------------------------- a whole run


def test_a_run_with_real_engines_outlives_the_store_s_master(tmp_path: Path) -> None:
    """Two rollout workers, two SGLang servers, two trainer ranks, the weights of every version compared; every group is trained once."""
    from tests.system.runs import REPOSITORY, logs, metrics, start, wait_for
    from tests.system.test_journal import SHAPE, WARM, check, trained
    from tests.system.test_rollout_workers import TWO

    own, directory = Master(tmp_path / "log"), tmp_path / "run"
    settings = [f"queue.mooncake.{name}={value}" for name, value in queue(own)["mooncake"].items()]
    settings.append(f"engines.python={REPOSITORY / '.venv-engine' / 'bin' / 'python'}")
    command = start(directory, *SHAPE, *TWO, "queue.payloads=mooncake", *settings)

    def reached(step: int) -> bool:
        return wait_for(lambda: trained(directory, 0, step) or command.process.poll() is not None, 150) and trained(directory, 0, step)

    try:
        assert reached(WARM + 2), logs(directory)
        own.kill()
        own.start()
        assert reached(metrics(directory)[-1]["step"] + 2), logs(directory)
        status, _, error = command.finish()
        assert status == 0, error[-3000:] + logs(directory)
        check(directory, again=False)
        left = opened(own, writes=False)
        assert left._client.remove_matching("^asyncmoe:") == 0, "nothing of the run is left"
        left.close()
    finally:
        command.process.kill()
        own.kill()
