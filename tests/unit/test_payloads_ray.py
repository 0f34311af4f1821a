"""Groups in the object store of a real Ray cluster, and a run that has them there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.queue import QueueSection
from asyncmoe.errors import DataError, StorageError, UserError
from asyncmoe.payloads.opening import open_store
from asyncmoe.payloads.packed import Asked
from asyncmoe.trajectory import part
from tests.unit.ray_head import cluster
from tests.unit.test_payloads_redis import FRAMES, KEYS, RUN, same
from tests.unit.test_rollout_workers import check
from tests.unit.worker_fleet import BATCH, Cluster

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("ray") is None, reason="without the package ray")]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    with cluster() as connected:
        yield connected


def opened(**more: Any) -> Any:
    return open_store(QueueSection(payloads="ray", **{"lease_timeout_s": 5.0, **more}))


def test_what_was_put_comes_out_as_it_is_asked_for_until_it_is_deleted() -> None:
    store, reader = opened(), opened()
    prefix = store.begin(RUN)
    names = [f"{prefix}w.{number}" for number in range(3)]
    for name in names:
        store.put(name, FRAMES)
    asked = [Asked(name, key, (1, 4), False) for name in names for key in KEYS]
    assert all(same(one, part(FRAMES[each.key], (1, 4), False)) for one, each in zip(reader.get(asked), asked, strict=True))
    assert same(reader.get([Asked(names[0], KEYS[1])])[0], FRAMES[KEYS[1]])
    store.delete([names[0], names[0], f"{prefix}w.9"])
    gone, there = reader.get([Asked(names[0], KEYS[0]), Asked(names[1], KEYS[0])])
    assert isinstance(gone, DataError)
    assert "got nothing" in str(gone)
    assert same(there, FRAMES[KEYS[0]])
    assert store.sweep(prefix, [names[1]]) == 0
    store._left_s = -1.0
    assert store.sweep(prefix, [names[1]]) == 1
    store.clear(prefix)
    with pytest.raises(StorageError, match=r"payloads: Ray has failed: .*start the run again") as failed:
        reader.get([Asked(names[1], KEYS[0])])
    assert "\n" not in str(failed.value)


def test_a_group_waits_for_room_under_the_bound_and_then_is_given_up() -> None:
    nbytes = 3000
    store = opened(payload_bytes=nbytes, lease_timeout_s=0.3)
    prefix = store.begin(RUN)
    store.put(f"{prefix}w.0", FRAMES)
    with pytest.raises(StorageError, match=r"queue\.payload_bytes = .*nothing was freed for 0.3 s \(queue.lease_timeout_s\)"):
        store.put(f"{prefix}w.1", FRAMES)
    patient = opened(payload_bytes=nbytes, lease_timeout_s=30.0)
    waiting = threading.Thread(target=patient.put, args=(f"{prefix}w.1", FRAMES))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    store.delete([f"{prefix}w.0"])
    waiting.join(30)
    assert same(store.get([Asked(f"{prefix}w.1", KEYS[0])])[0], FRAMES[KEYS[0]])
    with pytest.raises(StorageError, match=r"got a group of .*, expected at most queue\.payload_bytes = .*; raise it"):
        opened(payload_bytes=100).put(f"{prefix}w.2", FRAMES)
    store.clear(prefix)


def test_a_run_trains_from_the_store_and_without_it_from_the_journal(tmp_path: Path) -> None:
    async def run() -> None:
        async with Cluster(tmp_path, workers=2, engines=4, seed=1, payloads="ray") as made:
            for step in range(3):
                leased = await made.train(step)
                assert all(item.stored.startswith("ray:") for item in leased.items)
            leased = await made.queue.lease(3, "rl", BATCH, 3, 20.0)
            assert made.stored is not None
            await asyncio.to_thread(made.stored._store.delete, [item.stored for item in leased.items])
            await made.train(3)
            check(made, 4)

    asyncio.run(run())


def test_without_a_cluster_the_value_is_refused(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=r"queue\.payloads: Ray cluster at 127.0.0.1:1: got .*, expected one that answers; ray start"
    ) as failed:
        opened()
    assert time.monotonic() - begun < 60, "it was tried for as long as Ray tries"
    assert "\n" not in str(failed.value)
