"""Exchanges that are prepared once: bounded memory, overlap, digests, and failures."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from reshard_ranks import Arrays, Messages, ThreadTransport, Wires, blank, filled, numbered, on_ranks

from asyncmoe.errors import InvariantBroken, LayoutError, TransferError
from asyncmoe.reshard import PADDING, Box, Exchanger, LayoutBuilder, Plan, RankLayout, plan

SHAPES = {"w": (24, 60), "v": (7,)}
SOURCES, DESTINATIONS = (0, 1, 2), (2, 3)  # rank 2 is both


def layouts() -> tuple[list[RankLayout], list[RankLayout]]:
    """Rows of w and all of v on three ranks, to columns of w, and v with padding, on two."""
    source, destination = [], []
    for number, rank in enumerate(SOURCES):
        builder = LayoutBuilder(rank, "int32")
        builder.place("w", (8, 60), [("w", Box((8 * number, 0), (8, 60)), (0, 0))])
        builder.place("v", (7,), [("v", Box((0,), (7,)), (0,))])
        source.append(builder.build())
    for number, rank in enumerate(DESTINATIONS):
        builder = LayoutBuilder(rank, "int32")
        builder.place("w", (24, 30), [("w", Box((0, 30 * number), (24, 30)), (0, 0))])
        builder.place("v", (9,), [("v", Box((0,), (7,)), (0,)), (PADDING, Box((0,), (2,)), (7,))])
        destination.append(builder.build())
    return source, destination


MADE = plan(SHAPES, *layouts())
VALUES = numbered(SHAPES)


def arrays_of(rank: int) -> tuple[Arrays, Arrays]:
    """What a rank sends, and what it receives into."""
    source, destination = layouts()
    mine = [filled(layout, VALUES) for layout in source if layout.rank == rank]
    return (mine[0] if mine else {}), next((blank(layout) for layout in destination if layout.rank == rank), {})


def check(rank: int, got: Arrays) -> None:
    for layout in layouts()[1]:
        if layout.rank == rank:
            for name, expected in filled(layout, VALUES).items():
                np.testing.assert_array_equal(got[name], expected)


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
    wires, barrier = Wires(), threading.Barrier(4, timeout=30)

    def play(rank: int) -> None:
        mine, got = arrays_of(rank)
        transport = ThreadTransport(rank, wires)
        with Exchanger(MADE, transport, bucket_bytes=bucket_bytes, buffers=buffers, timeout_s=20, threads=1) as exchanger:
            assert exchanger.buffer_bytes <= buffers * bucket_bytes
            exchanger.bind(mine, got)
            for _ in range(3):
                moved = exchanger.run()
                check(rank, got)
                for array in got.values():
                    array[...] = -1
                assert sum(buffer.nbytes for buffer in transport.buffers) <= exchanger.buffer_bytes
                assert moved.sent - MADE.egress.get(rank, 0) in range(0, 1 + 15 * 400)
                barrier.wait()

    assert on_ranks(range(4), play) == {}


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_rounds_are_posted_before_the_one_before_is_over(buffers: int) -> None:
    wires = Wires()
    transports = {rank: PostingTransport(rank, wires) for rank in range(4)}

    def turn(rank: int) -> None:
        mine, got = arrays_of(rank)
        with Exchanger(MADE, transports[rank], bucket_bytes=600, buffers=buffers, timeout_s=20, threads=1) as exchanger:
            exchanger.bind(mine, got)
            exchanger.run()
        check(rank, got)

    assert on_ranks(range(4), turn) == {}
    for transport in transports.values():
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
        exchangers[rank] = Exchanger(MADE, ThreadTransport(rank, wires), bucket_bytes=1000, timeout_s=2, threads=1)
        exchangers[rank].bind(*arrays_of(rank))
        exchangers[rank].run()

    (error,) = on_ranks(range(4), play).values()
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
        Exchanger(MADE, ThreadTransport(0, Wires()), bucket_bytes=8)
    exchanger = Exchanger(MADE, ThreadTransport(0, Wires()))
    with pytest.raises(InvariantBroken, match="bind"):
        exchanger.run()
    exchanger.close()
    exchanger.close()
    for use in (exchanger.run, exchanger.bind):
        with pytest.raises(InvariantBroken, match="closed"):
            use()
