"""Ranks played by threads of one process, and arrays filled by plain NumPy from a layout."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from asyncmoe.reshard import PADDING, Box, Exchanger, LayoutBuilder, Piece, Plan, RankLayout, exchange, plan

Arrays = dict[str, np.ndarray]


Messages = Sequence[tuple[int, np.ndarray]]


class Wires:
    """Messages between threads; `damage` may change one on its way (source, destination, number, content)."""

    def __init__(self, damage: Callable[[int, int, int, np.ndarray], None] | None = None) -> None:
        self._boxes: dict[tuple[int, int], queue.Queue[np.ndarray]] = {}
        self._lock = threading.Lock()
        self._damage, self._count = damage, Counter[tuple[int, int]]()

    def box(self, source: int, destination: int) -> queue.Queue[np.ndarray]:
        with self._lock:
            return self._boxes.setdefault((source, destination), queue.Queue())

    def put(self, source: int, destination: int, message: np.ndarray) -> None:
        message = message.copy()
        if self._damage:
            self._damage(source, destination, self._count[source, destination], message)
            self._count[source, destination] += 1
        self.box(source, destination).put(message)


class ThreadTransport:
    """A transport between threads; sends never wait."""

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


def run_ranks(made: Plan | Callable[[int], Plan], sources: Mapping[int, Arrays], destinations: Mapping[int, Arrays], **how: int) -> None:
    """Carry out a plan, of which every rank may make its own part, each in its own thread; raises the first error of any of them."""
    wires = Wires()

    def run(rank: int) -> None:
        mine = made if isinstance(made, Plan) else made(rank)
        exchange(mine, ThreadTransport(rank, wires), sources.get(rank), destinations.get(rank), timeout_s=20, threads=1, **how)

    if failures := on_ranks({*sources, *destinations}, run):
        raise next(iter(failures.values()))


def on_ranks(ranks: Collection[int], play: Callable[[int], object]) -> dict[int, BaseException]:
    """Play ranks in threads; return what they raised, by rank."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        played = {rank: threads.submit(play, rank) for rank in sorted(ranks)}
        return {rank: error for rank, one in played.items() if (error := one.exception(60)) is not None}


def numbered(shapes: Mapping[str, tuple[int, ...]], dtype: type = np.int32) -> Arrays:
    """Tensors whose elements are all different numbers, from 1 on."""
    values, first = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        values[name] = np.arange(first, first + size, dtype=dtype).reshape(shape)
        first += size
    return values


def blank(layout: RankLayout, dtype: type = np.int32) -> Arrays:
    """Arrays of `dtype`; in a layout of int32, those that are float32 all the same are so here."""
    wide = np.float32 if dtype is np.int32 else dtype
    return {name: np.full(one.shape, -1, wide if one.dtype == "float32" else dtype) for name, one in layout.storages.items()}


def filled(layout: RankLayout, values: Mapping[str, np.ndarray], dtype: type = np.int32) -> Arrays:
    """What the storages of a layout must hold, by the definition of a piece."""
    arrays = blank(layout, dtype)
    for piece in layout.pieces:
        part = 0 if piece.tensor == PADDING else inside(values[piece.tensor], piece.box)
        view(arrays[piece.storage], piece)[...] = part
    return arrays


def inside(values: np.ndarray, box: Box) -> np.ndarray:
    return values[(..., *(slice(s, s + n) for s, n in zip(box.start, box.extent, strict=True)))]


def view(array: np.ndarray, piece: Piece) -> np.ndarray:
    strides = [s * array.itemsize for s in piece.strides]
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[piece.offset :], piece.box.extent, strides)


def single(rank: int, storage: str, tensor: str, box: Box, dtype: str = "int32") -> RankLayout:
    """The layout of a rank with one storage, which has one box of one tensor."""
    builder = LayoutBuilder(rank, dtype)
    builder.stack(storage, [(tensor, box)])
    return builder.build()


class Stripes:
    """An exchange of every rank with every other: the rows of one tensor become its columns, and all of another goes from rank 1 to all.

    Attributes:
        source, destination: layouts by rank.
    """

    def __init__(self, world: int, shape: tuple[int, int] = (120, 90)) -> None:
        self.shapes = {"w": shape, "v": (9,)}
        self.values = numbered(self.shapes)
        self.source, self.destination = ([_striped(rank, world, shape, by_column) for rank in range(world)] for by_column in (False, True))
        self.plan = plan(self.shapes, self.source, self.destination)

    def sent(self, rank: int, number: int = 0) -> Arrays:
        """What a rank holds in an exchange of this number: other values each time, so that messages must not be mixed up."""
        return {name: array + 1000 * number for name, array in filled(self.source[rank], self.values).items()}

    def check(self, rank: int, got: Mapping[str, np.ndarray], number: int) -> None:
        for name, expected in filled(self.destination[rank], self.values).items():
            np.testing.assert_array_equal(got[name], expected + 1000 * number)

    def run(self, rank: int, exchanger: Exchanger, times: int, there: Callable[[Arrays], Any] = dict) -> None:
        """Exchange again and again, in host memory, which may be `there` to the exchanger."""
        mine, got = self.sent(rank), blank(self.destination[rank])
        exchanger.bind(there(mine), there(got))
        for number in range(times):
            for name, array in self.sent(rank, number).items():
                mine[name][...] = array
            exchanger.run()
            self.check(rank, got, number)


def _striped(rank: int, world: int, shape: tuple[int, int], by_column: bool) -> RankLayout:
    builder, (height, width) = LayoutBuilder(rank, "int32"), shape
    rows, columns = height // world, width // world
    builder.stack("w", [("w", Box((0, columns * rank), (height, columns)) if by_column else Box((rows * rank, 0), (rows, width)))])
    if by_column or rank == 1:
        builder.stack("v", [("v", Box((0,), (9,)))])
    return builder.build()
