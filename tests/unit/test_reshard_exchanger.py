"""Exchanges that are prepared once: bounded memory, overlap, digests, and failures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from reshard_ranks import Messages, Stripes, ThreadTransport, Wires, blank, on_ranks

from asyncmoe.errors import InvariantBroken, LayoutError, TransferError
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, Plan, plan

WORLD = 4
STRIPES = Stripes(WORLD, (24, 60))


class PostingTransport(ThreadTransport):
    """Receives only once the caller waits for it, and notes how many rounds are under way."""

    def __init__(self, rank: int, wires: Wires) -> None:
        super().__init__(rank, wires)
        self.posted = self.completed = 0
        self.under_way: list[int] = []

    def post(self, sends: Messages, receives: Messages) -> Callable[[float], None]:
        self.posted += 1
        self.under_way.append(self.posted - self.completed)
        for rank, buffer in sends:
            self._wires.put(self.rank, rank, buffer)

        def complete(timeout_s: float) -> None:
            time.sleep(0.005)
            self.exchange([], receives, timeout_s)
            self.completed += 1

        return complete


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [200, 1000, 1 << 20])
def test_runs_again_and_again_in_bounded_memory(bucket_bytes: int, buffers: int) -> None:
    wires = Wires()

    def play(rank: int) -> None:
        transport = ThreadTransport(rank, wires)
        with Exchanger(STRIPES.plan, transport, bucket_bytes=bucket_bytes, buffers=buffers, timeout_s=20, threads=1) as exchanger:
            assert exchanger.buffer_bytes <= buffers * bucket_bytes
            STRIPES.run(rank, exchanger, 3)
            moved = exchanger.run()
            assert sum(buffer.nbytes for buffer in transport.buffers) <= exchanger.buffer_bytes
            assert moved.sent - STRIPES.plan.egress[rank] in range(0, 1 + 15 * 400)

    assert on_ranks(range(WORLD), play) == {}


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_rounds_are_posted_before_the_one_before_is_over(buffers: int) -> None:
    wires = Wires()
    transports = [PostingTransport(rank, wires) for rank in range(WORLD)]

    def turn(rank: int) -> None:
        with Exchanger(STRIPES.plan, transports[rank], bucket_bytes=600, buffers=buffers, timeout_s=20, threads=1) as exchanger:
            STRIPES.run(rank, exchanger, 1)

    assert on_ranks(range(WORLD), turn) == {}
    for transport in transports:
        assert transport.posted == transport.completed > 3
        assert max(transport.under_way) == buffers


def one_to_one(tensors: int, size: int = 8, dtype: str = "int32") -> Plan:
    names = [f"t{i}" for i in range(tensors)]
    sides = []
    for rank in range(2):
        builder = LayoutBuilder(rank, dtype)
        for name in names:
            builder.place(name, (size,), [(name, Box((0,), (size,)), (0,))])
        sides.append(builder.build())
    return plan(dict.fromkeys(names, (size,)), sides[:1], sides[1:])


def flip(source: int, destination: int, number: int, message: np.ndarray) -> None:
    if (source, destination, number) == (1, 3, 2):
        message[5] ^= 1


def test_a_damaged_message_is_an_error_that_names_both_ranks() -> None:
    wires, exchangers = Wires(flip), dict[int, Exchanger]()

    def play(rank: int) -> None:
        exchangers[rank] = Exchanger(STRIPES.plan, ThreadTransport(rank, wires), bucket_bytes=600, timeout_s=2, threads=1)
        exchangers[rank].bind(STRIPES.sent(rank), blank(STRIPES.destination[rank]))
        exchangers[rank].run()

    error = on_ranks(range(WORLD), play)[3]  # the others wait for its messages
    assert (error.source, error.destination) == (1, 3)
    assert "message 3 of" in str(error)
    with pytest.raises(InvariantBroken, match="make a new one"):
        exchangers[3].run()


def test_a_message_of_an_earlier_run_is_not_taken_for_a_new_one() -> None:
    made = one_to_one(1)
    kept: list[np.ndarray] = []

    def replay(source: int, destination: int, number: int, message: np.ndarray) -> None:
        if number:
            message[:] = kept[0]
        kept.append(message.copy())

    wires = Wires(replay)

    def play(rank: int) -> None:
        arrays = {"t0": np.arange(8, dtype=np.int32)}
        with Exchanger(made, ThreadTransport(rank, wires), timeout_s=5, threads=1) as exchanger:
            exchanger.bind(arrays if rank == 0 else None, arrays if rank == 1 else None)
            exchanger.run()
            exchanger.run()

    (error,) = on_ranks(range(2), play).values()
    assert isinstance(error, TransferError)


def test_a_message_of_another_plan_is_not_taken_for_one_of_this() -> None:
    wires = Wires()

    def play(rank: int) -> None:
        arrays = {"t0": np.arange(8, dtype=np.int32 if rank else np.float32)}
        made = one_to_one(1, dtype="int32" if rank else "float32")
        with Exchanger(made, ThreadTransport(rank, wires), timeout_s=5, threads=1) as exchanger:
            exchanger.bind(*((None, arrays) if rank else (arrays, None)))
            exchanger.run()

    (error,) = on_ranks(range(2), play).values()
    assert isinstance(error, TransferError)
    assert "of another plan" in str(error)


def test_a_run_does_nothing_in_python_for_a_tensor() -> None:
    calls = {}
    for tensors in (5, 500):
        made, wires = one_to_one(tensors), Wires()
        arrays = {f"t{i}": np.full(8, i, np.int32) for i in range(tensors)}
        exchanger = Exchanger(made, ThreadTransport(0, wires), threads=1)
        exchanger.bind(arrays, None)
        counted = [0]

        def count(frame: object, event: str, argument: object, counted: list[int] = counted) -> None:
            counted[0] += event in ("call", "c_call")

        sys.setprofile(count)
        exchanger.run()
        sys.setprofile(None)
        calls[tensors] = counted[0]
        exchanger.close()
    # One call a tensor would add 495. Waits poll, and what they add depends on the machine's load.
    assert calls[500] - calls[5] < 495 / 2


def test_misuse_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"bucket_bytes, for a box .* from rank 0 to rank .*one element of 4 bytes"):
        Exchanger(STRIPES.plan, ThreadTransport(0, Wires()), bucket_bytes=8)
    exchanger = Exchanger(STRIPES.plan, ThreadTransport(0, Wires()))
    with pytest.raises(InvariantBroken, match="bind"):
        exchanger.run()
    exchanger.close()
    exchanger.close()
    for use in (exchanger.run, exchanger.bind):
        with pytest.raises(InvariantBroken, match="closed"):
            use()
