"""Exchanges that are prepared once: bounded memory, overlap, digests, and what happens when something goes wrong."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from reshard_ranks import Arrays, blank, filled, numbered

from asyncmoe.errors import InvariantBroken, LayoutError, TransferError
from asyncmoe.reshard import PADDING, Box, Exchanger, LayoutBuilder, LocalTransport, Plan, RankLayout, plan

SHAPES = {"w": (24, 60), "v": (7,)}
SOURCES, DESTINATIONS = (0, 1, 2), (2, 3)  # rank 2 is both

Messages = Sequence[tuple[int, np.ndarray]]


class Wires:
    """Messages between threads; `damage` may change one on its way (source, destination, number, content)."""

    def __init__(self, damage: Callable[[int, int, int, np.ndarray], None] | None = None) -> None:
        self._boxes: dict[tuple[int, int], queue.Queue[np.ndarray]] = {}
        self._lock = threading.Lock()
        self._damage, self._count = damage, dict[tuple[int, int], int]()

    def box(self, source: int, destination: int) -> queue.Queue[np.ndarray]:
        with self._lock:
            return self._boxes.setdefault((source, destination), queue.Queue())

    def put(self, source: int, destination: int, buffer: np.ndarray) -> None:
        message = buffer.copy()
        if self._damage:
            number = self._count.get((source, destination), 0)
            self._count[source, destination] = number + 1
            self._damage(source, destination, number, message)
        self.box(source, destination).put(message)


class ThreadTransport:
    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank, self._wires = rank, wires
        self.buffers: list[np.ndarray] = []

    def empty(self, nbytes: int) -> np.ndarray:
        self.buffers.append(np.full(nbytes, 0xEE, np.uint8))
        return self.buffers[-1]

    def exchange(self, sends: Messages, receives: Messages, timeout_s: float) -> None:
        for rank, buffer in sends:
            self._wires.put(self.rank, rank, buffer)
        for rank, buffer in receives:
            buffer[:] = self._wires.box(rank, self.rank).get(timeout=timeout_s)


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


def made_plan() -> Plan:
    return plan(SHAPES, *layouts())


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


def on_ranks(ranks: Sequence[int], play: Callable[[int], None]) -> list[BaseException]:
    """Play all ranks in threads; what they raised, by rank."""
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            play(rank)
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            failures[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [failures[rank] for rank in sorted(failures)]


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [200, 1000, 1 << 20])
def test_runs_again_and_again_in_bounded_memory(bucket_bytes: int, buffers: int) -> None:
    made, wires = made_plan(), Wires()
    source, destination = layouts()
    values = numbered(SHAPES)
    barrier = threading.Barrier(4, timeout=30)

    def play(rank: int) -> None:
        mine: Arrays = {name: array for layout in source if layout.rank == rank for name, array in filled(layout, values).items()}
        got: Arrays = {name: array for layout in destination if layout.rank == rank for name, array in blank(layout).items()}
        transport = ThreadTransport(rank, wires)
        with Exchanger(made, transport, bucket_bytes=bucket_bytes, buffers=buffers, timeout_s=20, threads=1) as exchanger:
            assert exchanger.buffer_bytes <= buffers * bucket_bytes
            exchanger.bind(mine, got)
            for _ in range(3):
                moved = exchanger.run()
                for layout in destination:
                    if layout.rank == rank:
                        for name, expected in filled(layout, values).items():
                            np.testing.assert_array_equal(got[name], expected)
                            got[name][...] = -1
                assert sum(buffer.nbytes for buffer in transport.buffers) <= exchanger.buffer_bytes + 1
                assert moved.sent - made.egress.get(rank, 0) in range(0, 1 + 15 * 400)
                barrier.wait()

    assert on_ranks(range(4), play) == []


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_rounds_are_posted_before_the_one_before_is_over(buffers: int) -> None:
    made, wires = made_plan(), Wires()
    source, destination = layouts()
    values = numbered(SHAPES)
    transports = {rank: PostingTransport(rank, wires) for rank in range(4)}
    got = {layout.rank: blank(layout) for layout in destination}

    def turn(rank: int) -> None:
        held = filled(source[rank], values) if rank in SOURCES else None
        with Exchanger(made, transports[rank], bucket_bytes=600, buffers=buffers, timeout_s=20, threads=1) as exchanger:
            exchanger.bind(held, got.get(rank))
            exchanger.run()

    assert on_ranks(range(4), turn) == []
    for layout in destination:
        for name, expected in filled(layout, values).items():
            np.testing.assert_array_equal(got[layout.rank][name], expected)
    for transport in transports.values():
        assert transport.posted == transport.completed > 3
        assert max(transport.under_way) == buffers


def test_padding_alone_needs_no_peer() -> None:
    builder = LayoutBuilder(0, "int32")
    builder.place("p", (5,), [(PADDING, Box((0,), (5,)), (0,))])
    got = {"p": np.full(5, -1, np.int32)}
    for buffers in (1, 2):
        got["p"][...] = -1
        with Exchanger(plan({}, [], [builder.build()]), LocalTransport(), buffers=buffers) as exchanger:
            exchanger.bind(None, got)
            assert exchanger.run().local == 20
        assert not got["p"].any()


def one_to_one(tensors: int, size: int = 8) -> Plan:
    names = [f"t{i}" for i in range(tensors)]
    sides = []
    for rank in range(2):
        builder = LayoutBuilder(rank, "int32")
        for name in names:
            builder.place(name, (size,), [(name, Box((0,), (size,)), (0,))])
        sides.append(builder.build())
    return plan(dict.fromkeys(names, (size,)), sides[:1], sides[1:])


def test_the_next_message_is_packed_while_one_travels() -> None:
    made, wires = one_to_one(1, 1000), Wires()
    seen: list[bool] = []

    class Slow(ThreadTransport):
        def exchange(self, sends: Messages, receives: Messages, timeout_s: float) -> None:
            if self.rank == 0 and not seen:
                other = self.buffers[-1]  # the second slot: packed while the first message is under way
                deadline = time.monotonic() + 5
                while (other == 0xEE).all() and time.monotonic() < deadline:
                    time.sleep(0.001)
                seen.append(not (other == 0xEE).all())
            super().exchange(sends, receives, timeout_s)

    def play(rank: int) -> None:
        arrays = {"t0": np.arange(1000, dtype=np.int32)}
        with Exchanger(made, Slow(rank, wires), bucket_bytes=1000, timeout_s=20, threads=1) as exchanger:
            exchanger.bind(arrays if rank == 0 else None, arrays if rank == 1 else None)
            exchanger.run()

    assert on_ranks(range(2), play) == []
    assert seen == [True]


def flip(source: int, destination: int, number: int, message: np.ndarray) -> None:
    if (source, destination, number) == (1, 3, 2):
        message[5] ^= 1


def test_a_damaged_message_is_an_error_that_names_both_ranks() -> None:
    made, wires = made_plan(), Wires(flip)
    source, destination = layouts()
    values = numbered(SHAPES)
    exchangers: dict[int, Exchanger] = {}

    def play(rank: int) -> None:
        mine: Arrays = {name: array for layout in source if layout.rank == rank for name, array in filled(layout, values).items()}
        got: Arrays = {name: array for layout in destination if layout.rank == rank for name, array in blank(layout).items()}
        exchangers[rank] = Exchanger(made, ThreadTransport(rank, wires), bucket_bytes=1000, timeout_s=2, threads=1)
        exchangers[rank].bind(mine, got)
        exchangers[rank].run()

    (error,) = on_ranks(range(4), play)
    assert isinstance(error, TransferError)
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

    (error,) = on_ranks(range(2), play)
    assert isinstance(error, TransferError)


def test_a_message_of_another_plan_is_not_taken_for_one_of_this() -> None:
    wires = Wires()

    def play(rank: int) -> None:
        builders = [LayoutBuilder(one, "int32" if rank else "float32") for one in range(2)]
        for builder in builders:
            builder.place("t", (8,), [("t", Box((0,), (8,)), (0,))])
        source, destination = (builder.build() for builder in builders)
        arrays = {"t": np.arange(8, dtype=np.int32 if rank else np.float32)}
        with Exchanger(plan({"t": (8,)}, [source], [destination]), ThreadTransport(rank, wires), timeout_s=5, threads=1) as exchanger:
            exchanger.bind(*((None, arrays) if rank else (arrays, None)))
            exchanger.run()

    (error,) = on_ranks(range(2), play)
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


@pytest.mark.parametrize(
    ("changes", "match"), [({"bucket_bytes": 0}, "bucket_bytes"), ({"buffers": 0}, "buffers"), ({"bucket_bytes": 8}, "element")]
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, int], match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        Exchanger(made_plan(), ThreadTransport(0, Wires()), **changes)  # type: ignore[arg-type]


def test_a_run_without_arrays_is_refused() -> None:
    with pytest.raises(InvariantBroken, match="bind"):
        Exchanger(made_plan(), ThreadTransport(0, Wires())).run()
