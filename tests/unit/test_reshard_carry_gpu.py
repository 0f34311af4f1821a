"""Messages in host memory over transports between GPUs, on the stand-in of them: through buffers on the device, bounded and kept."""

from __future__ import annotations

import ctypes
import queue
import secrets
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from device_standin import TOTAL, Machine, machine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_reshard_carry import SIZES, Queues, connected, together

from asyncmoe.errors import LayoutError, OutOfDeviceMemory, WaitTimeout
from asyncmoe.reshard.carry import Carrier
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.ipc_transport import IpcTransport
from asyncmoe.reshard.memory import DeviceBuffer

__all__ = ["machine"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")


def view(buffer: DeviceBuffer) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address), np.uint8)


class DeviceQueues:
    """NCCL's place: messages between buffers on a device, waited for."""

    waits = True

    def __init__(self, rank: int, lanes: dict[tuple[int, int], queue.Queue[bytes]]) -> None:
        self.rank, self.asked, self._gpu = rank, [], Gpu(1)  # type: ignore[var-annotated]
        self._host = Queues(rank, lanes)

    def empty(self, nbytes: int) -> DeviceBuffer:
        self.asked.append(nbytes)
        return self._gpu.allocate(nbytes)

    def exchange(self, sends: Sequence[tuple[int, DeviceBuffer]], receives: Sequence[tuple[int, DeviceBuffer]], timeout_s: float) -> None:
        self._host.exchange([(peer, view(one)) for peer, one in sends], [(peer, view(one)) for peer, one in receives], timeout_s)


def over_queues() -> Callable[[int], Any]:
    lanes = {(a, b): queue.Queue[bytes]() for a in range(4) for b in range(4)}
    return lambda rank: DeviceQueues(rank, lanes)


def over_ipc() -> Callable[[int], Any]:
    session = secrets.token_hex(8)
    return lambda rank: IpcTransport(rank, session, 1)


@pytest.mark.parametrize("way", [over_queues, over_ipc])
@given(st.lists(SIZES, min_size=1, max_size=3), st.integers(0, 1 << 32))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_message_arrives_whole_and_in_order_in_every_run(
    machine: Machine, way: Callable[[], Callable[[int], Any]], runs: list[dict[tuple[int, int], list[int]]], seed: int
) -> None:
    generator, make = np.random.default_rng(seed), way()
    carriers = connected({rank: make(rank) for rank in range(4)})
    for sizes in runs:
        pairs = {pair: [generator.integers(0, 256, size, np.uint8) for size in several] for pair, several in sizes.items()}
        found = together(carriers, pairs)
        expected = {pair: [one.tobytes() for one in several] for pair, several in pairs.items() if several}
        assert {pair: [one.tobytes() for one in several] for pair, several in found.items()} == expected
    with ThreadPoolExecutor(4) as threads:  # each waits until its peers have let go of its memory
        list(threads.map(Carrier.close, carriers.values()))


def test_device_memory_is_taken_once_and_does_not_grow_with_messages(machine: Machine) -> None:
    make = over_queues()
    transports = {rank: make(rank) for rank in range(2)}
    carriers = connected(transports, piece_bytes=3000)
    taken = {rank: list(one.asked) for rank, one in transports.items()}
    assert sorted(taken[0]) == [1] + [3000] * 4
    free = machine.free(1)
    for _ in range(3):
        together(carriers, {(0, 1): [np.arange(100_000, dtype=np.uint32).view(np.uint8)]})
        assert machine.free(1) == free
    assert {rank: one.asked for rank, one in transports.items()} == taken


def test_a_gpu_without_room_says_so(machine: Machine) -> None:
    make = over_queues()
    machine.reset(5000)
    try:
        with pytest.raises(OutOfDeviceMemory):
            Carrier(make(0), [1], [1], piece_bytes=3000)
    finally:
        machine.reset(TOTAL)


def test_a_peer_that_does_not_come_is_named(machine: Machine) -> None:
    with pytest.raises(WaitTimeout, match="rank 1"):
        Carrier(over_queues()(0), [], [1]).run({}, {1: [10]}, print, 0.2)


def test_a_transport_that_only_enqueues_is_refused(machine: Machine) -> None:
    transport = over_queues()(0)
    transport.waits = False
    with pytest.raises(LayoutError, match="got DeviceQueues, which only enqueues them, expected one that waits"):
        Carrier(transport, [1], [1])
