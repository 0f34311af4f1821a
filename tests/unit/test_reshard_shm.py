"""Messages in shared memory between real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reshard_ranks import Stripes, single

import asyncmoe.reshard._C as _C
from asyncmoe.errors import TransferError, WaitTimeout
from asyncmoe.reshard import Box, Exchanger, Moved, Plan, exchange, plan
from asyncmoe.reshard.shm_transport import ShmTransport

WORLD = 3
STRIPES = Stripes(WORLD)


def segments(session: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if session in path.name]


def start(play: Callable[..., None], *arguments: Any) -> multiprocessing.Process:
    process = multiprocessing.get_context("spawn").Process(target=play, args=arguments)
    process.start()  # type: ignore[attr-defined]
    return process  # type: ignore[return-value]


def _all_to_all(rank: int, session: str, into: str) -> None:
    with Exchanger(STRIPES.plan, ShmTransport(rank, session), bucket_bytes=3000, timeout_s=30, threads=1) as exchanger:
        STRIPES.run(rank, exchanger, 4)
    Path(into, str(rank)).write_text("done")


def test_all_to_all_again_and_again(session: str, tmp_path: Path) -> None:
    processes = [start(_all_to_all, rank, session, str(tmp_path)) for rank in range(WORLD)]
    for process in processes:
        process.join(60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert segments(session) == []


def pair() -> Plan:
    source, destination = (single(rank, "s", "t", Box((0,), (1000,))) for rank in range(2))
    return plan({"t": (1000,)}, [source], [destination])


def _send_once(session: str, delay_s: float, signal_name: str) -> None:
    """Rank 0 of `pair`: wait, then send; or stop or die in the middle."""
    time.sleep(delay_s)
    transport = ShmTransport(0, session)
    if signal_name:
        made = Exchanger(pair(), transport, bucket_bytes=1000, timeout_s=30)
        made.bind({"s": np.arange(1000, dtype=np.int32)})
        while segments(session):  # until the receiver has met us
            time.sleep(0.01)
        made._pack_round(0, Moved(), None)
        os.kill(os.getpid(), getattr(signal, signal_name))
    exchange(pair(), transport, {"s": np.arange(1000, dtype=np.int32)}, timeout_s=30, bucket_bytes=1000)


@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_a_sender_that_leaves_at_once_has_been_heard(session: str, delay_s: float) -> None:
    """Either end may be first, and what was sent is not lost when the sender ends."""
    process = start(_send_once, session, 0.0, "")
    time.sleep(delay_s)
    got = {"s": np.zeros(1000, np.int32)}
    exchange(pair(), ShmTransport(1, session), None, got, timeout_s=30, bucket_bytes=1000)
    np.testing.assert_array_equal(got["s"], np.arange(1000))
    process.join(30)
    assert process.exitcode == 0
    assert segments(session) == []


def test_a_sender_that_never_comes(session: str) -> None:
    started = time.monotonic()
    with pytest.raises(WaitTimeout, match="rank 0"):
        Exchanger(pair(), ShmTransport(1, session), timeout_s=0.5)
    assert 0.4 < time.monotonic() - started < 5


def test_a_receiver_that_never_comes(session: str) -> None:
    exchanger = Exchanger(pair(), ShmTransport(0, session), bucket_bytes=1000, timeout_s=0.5)
    exchanger.bind({"s": np.zeros(1000, np.int32)})
    with pytest.raises(WaitTimeout, match="rank 1: room"):
        exchanger.run()
    exchanger.close()
    del exchanger
    assert segments(session) == []


@pytest.mark.parametrize(
    ("stop", "error", "said", "within_s"),
    [("SIGKILL", TransferError, "from rank 0 to rank 1: rank 0 is gone", 10), ("SIGSTOP", WaitTimeout, "rank 0: its message", 30)],
)
def test_a_sender_that_dies_in_the_middle_or_stalls_is_given_up(session: str, stop: str, error: type, said: str, within_s: int) -> None:
    process = start(_send_once, session, 0.0, stop)
    exchanger = Exchanger(pair(), ShmTransport(1, session), bucket_bytes=1000, timeout_s=30)
    exchanger.bind(None, {"s": np.zeros(1000, np.int32)})
    exchanger._timeout_s = 30.0 if stop == "SIGKILL" else 1.0
    started = time.monotonic()
    with pytest.raises(error, match=said):
        exchanger.run()
    assert time.monotonic() - started < within_s
    process.kill()
    process.join(10)
    assert segments(session) == []


def test_what_a_dead_process_left_behind_is_replaced(session: str) -> None:
    name = f"/asyncmoe-{session}-0-1"
    Path("/dev/shm" + name).write_bytes(b"\0" * 8192)  # nobody holds its lock
    assert _C.ShmRing.attach(name, 2, 100) is None
    ring = _C.ShmRing.create(name, 2, 100)
    other = _C.ShmRing.attach(name, 2, 100)
    assert segments(session) == []
    ring.slot(0)[:] = 7
    ring.advance()
    assert other.wait(5.0) == 0
    assert (other.slot(0) == 7).all()
    del other
    assert ring.wait(5.0, 2) == 2


def test_a_full_shm_is_an_error_not_a_crash(session: str) -> None:
    with pytest.raises(RuntimeError, match="bytes of /dev/shm"):
        _C.ShmRing.create(f"/asyncmoe-{session}-0-1", 1, 1 << 50)
    assert segments(session) == []
