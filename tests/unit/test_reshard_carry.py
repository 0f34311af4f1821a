"""Messages of sizes that differ from run to run, carried in pieces over rings of shared memory and over rounds of a transport."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import LayoutError, TransferError, WaitTimeout
from asyncmoe.reshard.carry import Carrier
from asyncmoe.reshard.shm_transport import ShmTransport

Messages = list[np.ndarray]
Pairs = dict[tuple[int, int], Messages]


class Queues:
    """A transport between threads of a process: a queue for each pair of ranks and direction."""

    def __init__(self, rank: int, lanes: dict[tuple[int, int], queue.Queue[bytes]]) -> None:
        self.rank, self._lanes = rank, lanes

    def empty(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def exchange(self, sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]], timeout_s: float) -> None:
        for peer, buffer in sends:
            self._lanes[self.rank, peer].put(buffer.tobytes())
        for peer, buffer in receives:
            try:
                buffer[...] = np.frombuffer(self._lanes[peer, self.rank].get(timeout=timeout_s), np.uint8)
            except queue.Empty:
                raise WaitTimeout(f"rank {peer}", "its message", timeout_s) from None


def over_queues() -> Callable[[int], Any]:
    lanes = {(a, b): queue.Queue[bytes]() for a in range(4) for b in range(4)}
    return lambda rank: Queues(rank, lanes)


def over_shm() -> Callable[[int], Any]:
    session = secrets.token_hex(8)
    return lambda rank: ShmTransport(rank, session)


def connected(transports: Mapping[int, Any], piece_bytes: int = 100) -> dict[int, Carrier]:
    """A carrier of every rank, to and from every other."""

    def make(rank: int) -> Carrier:
        others = [other for other in transports if other != rank]
        return Carrier(transports[rank], others, others, piece_bytes=piece_bytes, timeout_s=10.0)

    with ThreadPoolExecutor(len(transports)) as threads:
        return dict(zip(transports, threads.map(make, transports), strict=True))


def together(carriers: Mapping[int, Carrier], pairs: Pairs) -> Pairs:
    """What arrives when every rank sends and receives its part."""
    found: Pairs = {}

    def part_of(rank: int) -> None:
        outgoing = {b: messages for (a, b), messages in pairs.items() if a == rank}
        incoming = {a: [len(one) for one in messages] for (a, b), messages in pairs.items() if b == rank}
        carriers[rank].run(outgoing, incoming, lambda source, message: found.setdefault((source, rank), []).append(message), 10.0)

    with ThreadPoolExecutor(len(carriers)) as threads:
        list(threads.map(part_of, carriers))
    return found


SIZES = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1]), st.lists(st.integers(1, 350), max_size=4)
)


@pytest.mark.parametrize("way", [over_queues, over_shm])
@given(st.lists(SIZES, min_size=1, max_size=3), st.integers(0, 1 << 32))
@settings(max_examples=15, deadline=None)
def test_every_message_arrives_whole_and_in_order_in_every_run(
    way: Callable[[], Callable[[int], Any]], runs: list[dict[tuple[int, int], list[int]]], seed: int
) -> None:
    generator, make = np.random.default_rng(seed), way()
    carriers = connected({rank: make(rank) for rank in range(4)})
    for sizes in runs:
        pairs = {pair: [generator.integers(0, 256, size, np.uint8) for size in several] for pair, several in sizes.items()}
        found = together(carriers, pairs)
        expected = {pair: [one.tobytes() for one in several] for pair, several in pairs.items() if several}
        assert {pair: [one.tobytes() for one in several] for pair, several in found.items()} == expected
    for carrier in carriers.values():
        carrier.close()


def test_no_buffer_is_larger_than_a_piece_whatever_the_message() -> None:
    asked: list[int] = []

    class Counting(Queues):
        def empty(self, nbytes: int) -> np.ndarray:
            asked.append(nbytes)
            return super().empty(nbytes)

    lanes = {(a, b): queue.Queue[bytes]() for a in range(2) for b in range(2)}
    pairs = {(0, 1): [np.arange(100_000, dtype=np.uint32).view(np.uint8)]}
    found = together(connected({rank: Counting(rank, lanes) for rank in range(2)}, piece_bytes=3000), pairs)
    assert found[0, 1][0].tobytes() == pairs[0, 1][0].tobytes()
    assert sorted(asked) == [1, 1] + [3000] * 4  # a byte tells where buffers are
    asked.clear()
    for nbytes, piece in ((10, 10), (100_000, 64 << 10), (1 << 20, 128 << 10), (32 << 20, 1 << 20)):
        pairs = {(0, 1): [np.zeros(nbytes, np.uint8)]}
        together(connected({rank: Counting(rank, lanes) for rank in range(2)}, piece_bytes=1 << 20), pairs)
        assert max(asked) == piece, "buffers of a small message are smaller than itself, but not tiny"
        asked.clear()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(WaitTimeout, match="rank 1"):
        Carrier(over_shm()(0), [], [1], timeout_s=0.2)
    with pytest.raises(WaitTimeout, match="rank 1"):
        Carrier(over_queues()(0), [], [1]).run({}, {1: [10]}, print, 0.2)


def test_a_rank_that_refuses_a_message_ends_the_other_at_once() -> None:
    make = over_shm()
    carriers = connected({rank: make(rank) for rank in range(2)}, piece_bytes=1000)
    sent: list[Exception] = []

    def send() -> None:
        try:
            carriers[0].run({1: [np.zeros(5000, np.uint8)] * 3}, {}, print, 60.0)
        except TransferError as error:
            sent.append(error)

    def refuse(source: int, message: np.ndarray) -> None:
        raise TransferError(source, 1, "it is damaged")

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(TransferError, match="it is damaged"):
        carriers[1].run({}, {0: [5000] * 3}, refuse, 10.0)
    carriers[1].close()
    thread.join(10.0)
    assert "rank 1 is gone" in str(sent[0])


def test_sizes_and_ranks_that_are_none_are_refused() -> None:
    carrier = Carrier(over_queues()(0), [1], [1])
    for outgoing, incoming, said in (
        ({1: [np.empty(0, np.uint8)]}, {}, "expected a whole number from 1"),
        ({}, {1: [0]}, "expected a whole number from 1"),
        ({}, {1: [-3]}, "expected a whole number from 1"),
        ({}, {2: [5]}, "got rank 2, expected ranks that the carrier was made for"),
        ({3: []}, {}, "got rank 3, expected ranks that the carrier was made for"),
    ):
        with pytest.raises(LayoutError, match=said):
            carrier.run(outgoing, incoming, print)
