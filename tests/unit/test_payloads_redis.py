"""Groups in a real Redis server: what is put comes out or is named, what is over is gone, and nothing is left behind."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncmoe.config.queue import QueueSection
from asyncmoe.errors import ConfigError, DataError, StorageError, UserError
from asyncmoe.payloads.opening import open_store
from asyncmoe.payloads.packed import Asked
from asyncmoe.trajectory import Buffer, encode, frames_in, part
from tests.redis_server import LocalRedis, LossyLink, needed, server
from tests.unit.doc_pages import read
from tests.unit.test_config import GOOD, refused, with_value
from tests.unit.test_packed import trajectory

pytestmark = needed()
__all__ = ["server"]
RUN = "run1"
KEYS = ("g0.e0", "g0.e1")
FRAMES = {key: encode(trajectory(20, seed, True, True)) for seed, key in enumerate(KEYS)}


@pytest.fixture(autouse=True)
def blank(server: LocalRedis) -> Iterator[None]:
    yield
    server.configure(maxmemory="0", maxmemory_policy="noeviction")
    with server.client() as client:
        client.flushall()


def opened(server: LocalRedis, socket: Path | None = None, **more: Any) -> Any:
    from asyncmoe.payloads.in_redis import RedisGroups

    values = {"payloads": "redis", "redis": f"unix://{socket or server.socket}", "redis_patience_s": 5.0, "lease_timeout_s": 5.0, **more}
    return RedisGroups.open(QueueSection(**values), patient=socket is not None)


def left(server: LocalRedis) -> tuple[list[str], int, list[str]]:
    """Names in the stream, bytes counted, and groups with a hash."""
    with server.client() as client:
        stream = [told[b"name"].decode() for _, told in client.xrange(f"asyncmoe:{RUN}:payloads")]
        counted = int(client.hget(f"asyncmoe:{RUN}:totals", "bytes") or 0)
        return sorted(stream), counted, sorted(key.decode() for key in client.scan_iter(f"asyncmoe:{RUN}:payload:*"))


def same(found: list[Buffer] | DataError, expected: list[Buffer]) -> bool:
    assert not isinstance(found, DataError), found
    return [bytes(one) for one in found] == [bytes(one) for one in expected]


def test_what_was_put_comes_out_as_it_is_asked_for_until_it_is_deleted(server: LocalRedis) -> None:
    store = opened(server)
    prefix = store.begin(RUN)
    names = [f"{prefix}w.{number}" for number in range(3)]
    for name in names:
        store.put(name, FRAMES)
        store.put(name, FRAMES)  # again, as a request is whose answer was lost
    assert left(server)[0] == left(server)[2] == names
    asked = [Asked(name, key, (1, 4), False) for name in names for key in KEYS]
    assert all(same(one, part(FRAMES[each.key], (1, 4), False)) for one, each in zip(store.get(asked), asked, strict=True))
    whole = store.get([Asked(names[0], KEYS[1])])[0]
    assert len(whole) == frames_in(1)
    assert same(whole, FRAMES[KEYS[1]])
    store.delete([names[0], names[0], f"{prefix}w.9"])
    assert "got nothing" in str(store.get([Asked(names[0], KEYS[0])])[0])
    assert left(server)[0] == left(server)[2] == names[1:]
    store.delete(names)
    assert left(server) == ([], 0, [])
    store.close()


def test_more_than_one_request_holds_goes_in_parts(server: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncmoe.payloads import in_redis, redis_reading

    monkeypatch.setattr(in_redis, "BATCH_BYTES", 64)
    monkeypatch.setattr(redis_reading, "BATCH_BYTES", 64)
    monkeypatch.setattr(redis_reading, "_LOOKED_AT", 2)
    store = opened(server)
    name = f"{store.begin(RUN)}w.0"
    store.put(name, FRAMES)
    asked = [Asked(name, key, layers) for key in KEYS for layers in ((0,), None, (3, 4))]
    assert all(same(one, part(FRAMES[each.key], each.layers)) for one, each in zip(store.get(asked), asked, strict=True))
    store.close()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda client, one, other: client.delete(one), "got nothing"),
        (lambda client, one, other: client.hdel(one, "3 g0.e0"), "3: got nothing, expected"),
        (lambda client, one, other: client.hset(one, "3 g0.e0", b"x"), "3: got 1 bytes, expected"),
        (lambda client, one, other: client.hset(one, "head g0.e0", b"x" * (2 << 20)), "got 0 bytes"),
        (lambda client, one, other: client.hset(one, "3 g0.e0", client.hget(one, "4 g0.e0")), "3: got a wrong checksum"),
        (lambda client, one, other: client.hset(one, mapping={"head g0.e0": client.hget(one, "head g0.e1")}), "got a wrong checksum"),
        (lambda client, one, other: client.copy(other, one, replace=True), "got a wrong checksum"),
    ],
)
def test_what_is_gone_truncated_damaged_or_another_s_is_named_and_the_rest_is_read(server: LocalRedis, harm: Any, said: str) -> None:
    store = opened(server)
    prefix = store.begin(RUN)
    one, other = f"{prefix}w.0", f"{prefix}w.1"
    for name in (one, other):
        store.put(name, FRAMES)
    with server.client() as client:
        harm(client, one, other)
    wrong, right = store.get([Asked(one, "g0.e0"), Asked(other, "g0.e0")])
    assert isinstance(wrong, DataError)
    assert said in str(wrong)
    assert one in str(wrong)
    assert "\n" not in str(wrong)
    assert same(right, FRAMES["g0.e0"])
    store.close()


# ---------------------------------------------------------------- servers that cannot be used


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_drops_keys_is_refused_before_and_during_a_run(server: LocalRedis, policy: str) -> None:
    said = f"queue.redis: maxmemory-policy of unix:.*: got {policy}, expected noeviction or volatile-lru .*deletes what is not yet trained"
    store = opened(server)
    prefix = store.begin(RUN)
    server.configure(maxmemory_policy="volatile-lru")  # drops nothing of ours
    assert store.sweep(prefix, ()) == 0
    server.configure(maxmemory_policy=policy)
    with pytest.raises(UserError, match=said):
        opened(server)
    with pytest.raises(UserError, match=said) as failed:
        store.sweep(prefix, ())
    assert "\n" not in str(failed.value)
    store.close()


def test_a_server_that_does_not_answer_is_named_in_time(server: LocalRedis, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"queue\.redis: got unix:.*absent.*expected a Redis server that answers") as failed:
        open_store(QueueSection(payloads="redis", redis=f"unix://{tmp_path}/absent"), patient=False)
    assert "queue.payloads=workers needs none" in str(failed.value)
    own = LocalRedis(tmp_path / "redis")
    store = opened(own, redis_patience_s=0.5)
    name = f"{store.begin(RUN)}w.0"
    own.kill()
    for request in (lambda: store.put(name, FRAMES), lambda: store.get([Asked(name, KEYS[0])])):
        with pytest.raises(StorageError, match=r"payloads: unix:.* did not answer for 0.5 s .*queue\.redis_patience_s") as failed:
            request()
        assert "\n" not in str(failed.value)
    store.close()


def test_a_database_that_the_server_does_not_have_is_refused(server: LocalRedis) -> None:
    says = r"queue\.redis: got .*DB index is out of range.* expected one of the server's databases; name another"
    with pytest.raises(UserError, match=says) as failed:
        open_store(QueueSection(payloads="redis", redis=f"{server.url}?db=512"), patient=False)
    assert "\n" not in str(failed.value)


def test_the_password_s_variable_must_be_set(server: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUEUE_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=r"queue\.redis_password_variable: got QUEUE_PASSWORD, which is not set"):
        opened(server, redis_password_variable="QUEUE_PASSWORD")


def test_keys_that_do_not_fit_together_are_refused() -> None:
    assert "queue.redis: got null, expected the address of a server" in refused(with_value("queue.payloads", "redis"))
    assert "queue.redis: got redis://r, expected null because queue.payloads is workers" in refused(with_value("queue.redis", "redis://r"))
    line = refused({**GOOD, "queue": {"payloads": "redis", "redis": "redis://:secret@r"}})
    assert "queue.redis: got an address with a password" in line
    assert "secret" not in line


def test_the_guide_s_user_may_do_all_that_is_needed_and_one_that_may_not_is_sent_to_it(server: LocalRedis) -> None:
    (rights,) = re.findall(r"^user asyncmoe on >PASSWORD (.*)$", read("guides/payloads.md"), re.MULTILINE)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "small", "on", "nopass", *rights.split())
    address = {"redis": f"{server.url}?username=small&db=3", "payload_bytes": 1 << 20}
    store = opened(server, **address)
    name = f"{store.begin(RUN)}w.0"
    store.put(name, FRAMES)
    assert same(store.get([Asked(name, KEYS[0])])[0], FRAMES[KEYS[0]])
    assert store.sweep(name, [name]) == 0
    store.delete([name])
    store.clear(name)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "small", "-eval")
    with pytest.raises(UserError, match=r"queue\.redis: got .*, expected a user who may do it; docs/guides/payloads\.md has the list"):
        store.delete([name])
    store.close()


# ---------------------------------------------------------------- a full server


def test_a_group_waits_for_room_under_the_bound_and_then_is_given_up(server: LocalRedis) -> None:
    sizes = opened(server)
    first = f"{sizes.begin(RUN)}w.0"
    sizes.put(first, FRAMES)
    nbytes = left(server)[1]
    store = opened(server, payload_bytes=nbytes + nbytes // 2, lease_timeout_s=0.3)
    second = f"{first[:-1]}1"
    with pytest.raises(StorageError, match=r"queue\.payload_bytes = .*nothing was freed for 0.3 s \(queue.lease_timeout_s\)") as failed:
        store.put(second, FRAMES)
    assert "\n" not in str(failed.value)
    assert left(server)[0] == [first]
    patient = opened(server, payload_bytes=nbytes + nbytes // 2, lease_timeout_s=20.0)
    waiting = threading.Thread(target=patient.put, args=(second, FRAMES))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    sizes.delete([first])
    waiting.join(20)
    assert left(server) == ([second], nbytes, [second])
    with pytest.raises(StorageError, match=r"got a group of .*, expected at most queue\.payload_bytes = .*; raise it"):
        opened(server, payload_bytes=100).put(f"{first[:-1]}2", FRAMES)


def test_a_server_whose_memory_is_full_is_waited_for_then_named_and_can_still_be_emptied(server: LocalRedis) -> None:
    store = opened(server, lease_timeout_s=0.3)
    names = [f"{store.begin(RUN)}w.{number}" for number in range(2)]
    store.put(names[0], FRAMES)
    server.configure(maxmemory="1000000")
    with pytest.raises(StorageError, match=r"payloads: unix:.* is full \(.*raise its maxmemory, or lower queue.capacity") as failed:
        store.put(names[1], FRAMES)
    assert "\n" not in str(failed.value)
    store.delete(names)
    assert left(server) == ([], 0, [])
    store.close()


# ---------------------------------------------------------------- what is left


def test_what_an_earlier_controller_left_is_deleted_and_a_newer_one_s_is_not(server: LocalRedis) -> None:
    old = opened(server)
    before = old.begin(RUN)
    old.put(f"{before}w.0", FRAMES)
    new = opened(server)
    after = new.begin(RUN)
    assert before != after
    assert left(server)[2] == []
    new.put(f"{after}w.0", FRAMES)
    old.put(f"{before}w.1", FRAMES)  # it was only suspended
    old.clear(before)
    assert left(server)[0] == left(server)[2] == [f"{after}w.0"]
    new.clear(after)
    assert left(server) == ([], 0, [])


def test_nothing_is_left_of_a_run_that_has_ended_and_goes_on_later(server: LocalRedis) -> None:
    def keys() -> list[str]:
        with server.client() as client:
            return sorted(key.decode() for key in client.scan_iter("asyncmoe:*"))

    first = opened(server)
    before = first.begin(RUN)
    first.put(f"{before}w.0", FRAMES)
    first.clear(before)
    assert keys() == []
    first.clear(before)  # again, as a request is whose answer was lost
    first.delete([f"{before}w.0"])
    assert keys() == []
    first.put(f"{before}w.1", FRAMES)  # a group that was still on its way
    second = opened(server)
    after = second.begin(RUN)
    assert before != after
    assert left(server) == ([], 0, [])
    second.put(f"{after}w.0", FRAMES)
    nbytes = left(server)[1]
    first.clear(before)
    assert left(server) == ([f"{after}w.0"], nbytes, [f"{after}w.0"])
    second.delete([f"{after}w.0"])
    first.clear(before)
    third = opened(server)
    assert third.begin(RUN) not in (before, after), "the number of a newer controller is not forgotten"
    second.clear(after)
    assert keys() == [f"asyncmoe:{RUN}:payloads", f"asyncmoe:{RUN}:totals"]


def test_what_a_controller_put_after_its_server_lost_its_number_is_deleted_by_the_next(server: LocalRedis) -> None:
    old = opened(server)
    for _ in range(3):
        before = old.begin(RUN)
    with server.client() as client:
        client.flushall()  # started again, empty
    old.put(f"{before}w.0", FRAMES)
    new = opened(server)
    after = new.begin(RUN)
    assert left(server) == ([], 0, [])
    with server.client() as client:
        client.flushall()
    assert new.sweep(after, ()) == 0  # which notes the number again
    newest = opened(server)
    assert len({before, after, newest.begin(RUN)}) == 3


def test_a_server_that_is_full_of_an_earlier_controller_s_groups_is_emptied(server: LocalRedis) -> None:
    old = opened(server)
    before = old.begin(RUN)
    old.put(f"{before}w.0", FRAMES)
    server.configure(maxmemory="1000000")
    new = opened(server)
    assert new.begin(RUN) != before
    assert left(server) == ([], 0, [])
    assert new.sweep(before, ()) == 0


def test_what_nobody_knows_of_is_deleted_once_it_is_old_and_a_second_entry_at_once(server: LocalRedis) -> None:
    store = opened(server)
    prefix = store.begin(RUN)
    known, lost = f"{prefix}w.0", f"{prefix}w.1"
    for name in (known, lost):
        store.put(name, FRAMES)
    nbytes = left(server)[1]
    with server.client() as client:  # at least once: an entry may come twice
        client.xadd(f"asyncmoe:{RUN}:payloads", {"name": known, "bytes": nbytes // 2})
        client.hincrby(f"asyncmoe:{RUN}:totals", "bytes", nbytes // 2)
    assert store.sweep(prefix, [known]) == 1
    assert left(server) == ([known, lost], nbytes, [known, lost])
    assert same(store.get([Asked(known, KEYS[0])])[0], FRAMES[KEYS[0]])
    store._left_s = -1.0
    assert store.sweep(prefix, [known]) == 1
    assert left(server) == ([known], nbytes // 2, [known])
    with server.client() as client:
        client.delete(known)  # evicted, or by somebody
    store.delete([known])
    assert store.sweep(prefix, []) == 1
    assert left(server) == ([], 0, [])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 16), share=st.sampled_from([0.01, 0.05]), count=st.integers(1, 6))
def test_lost_answers_change_nothing(
    server: LocalRedis, tmp_path_factory: pytest.TempPathFactory, seed: int, share: float, count: int
) -> None:
    with server.client() as client:
        client.flushall()
    link = LossyLink(server, tmp_path_factory.mktemp("link"), share, seed)
    store = opened(server, link.socket, redis_patience_s=60.0)
    prefix = store.begin(RUN)
    names = [f"{prefix}w.{number}" for number in range(count)]
    for name in names:
        store.put(name, FRAMES)
    assert left(server)[0] == left(server)[2] == names
    nbytes = left(server)[1]
    assert all(same(one, FRAMES["g0.e0"]) for one in store.get([Asked(name, "g0.e0") for name in names]))
    store.delete(names[::2])
    assert left(server)[1] == nbytes * len(names[1::2]) // count
    store.clear(prefix)
    assert left(server) == ([], 0, [])
    store.close()
    link.close()


def test_a_group_that_its_server_loses_while_it_is_written_is_written_again(server: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(server)
    name = f"{store.begin(RUN)}w.0"
    write, losses = store._write, 1

    def lossy(*arguments: Any) -> None:
        nonlocal losses
        write(*arguments)
        if losses:
            losses -= 1
            with server.client() as client:
                client.flushall()

    monkeypatch.setattr(store, "_write", lossy)
    store.put(name, FRAMES)
    assert same(store.get([Asked(name, KEYS[0])])[0], FRAMES[KEYS[0]])
    losses = 99
    with pytest.raises(StorageError, match=r"has lost .* 3 times while it was written"):
        store.put(f"{name}1", FRAMES)
    store.close()
