"""Exchanges and deltas of weights on a GPU, on the stand-in of one: kernels are emulated, bytes must be the CPU's."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from delta_ranks import Ranks, change
from device_standin import TOTAL, Machine, machine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_gpu_fakes import bytes_of
from reshard_ranks import Stripes, ThreadTransport, Wires, numbered, on_ranks
from test_reshard_delta import DENSITIES, Case, apart, large, ranks_of, step
from test_reshard_random import cases

from asyncmoe.errors import InvariantBroken, OutOfDeviceMemory, TransferError
from asyncmoe.reshard import Exchanger
from asyncmoe.reshard.memory import DeviceBuffer

__all__ = ["machine"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")


def there(arrays: Mapping[str, np.ndarray]) -> dict[str, DeviceBuffer]:
    """Arrays as if they were on a GPU, in the same memory."""
    return {name: DeviceBuffer(array, array.ctypes.data, array.nbytes, "cuda:1") for name, array in arrays.items()}


# ---------------------------------------------------------------- an exchange of a CPU, rank 0, with a GPU, rank 1


class GpuTransport(ThreadTransport):
    waits = True

    def empty(self, nbytes: int) -> Any:
        return there({"": super().empty(nbytes)})[""]

    def exchange(self, sends: Any, receives: Any, timeout_s: float) -> None:
        super().exchange([(r, bytes_of(b)) for r, b in sends], [(r, bytes_of(b)) for r, b in receives], timeout_s)


STRIPES = Stripes(2, (62, 90))


def prepared(damage: Callable[[int, int, int, np.ndarray], None] | None = None) -> list[Exchanger]:
    """The exchangers of both ranks."""
    ends = enumerate((ThreadTransport, GpuTransport))
    wires = Wires(damage)
    return [Exchanger(STRIPES.plan, kind(rank, wires), bucket_bytes=1001, timeout_s=20, threads=1) for rank, kind in ends]


def play(ends: list[Exchanger], times: int = 1) -> dict[int, BaseException]:
    return on_ranks(range(2), lambda rank: STRIPES.run(rank, ends[rank], times, there if rank else dict))


@pytest.mark.usefixtures("machine")
def test_a_gpu_and_a_cpu_understand_each_other() -> None:
    assert play(prepared(), 3) == {}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("number", "place"), [(0, 0), (1, -1)])
def test_damage_is_found_at_the_end_of_a_run(number: int, place: int) -> None:
    """In the content of the first, and in the digest of the second message to the GPU."""

    def damage(source: int, destination: int, count: int, message: np.ndarray) -> None:
        message[place] ^= (source, destination, count) == (0, 1, number)

    ends = prepared(damage)
    errors = play(ends)
    assert isinstance(errors.pop(1), TransferError)
    assert errors == {}
    with pytest.raises(InvariantBroken, match="make a new one"):
        ends[1].run()


@pytest.mark.usefixtures("machine")
def test_copies_that_never_end() -> None:
    ends = prepared()
    assert play(ends) == {}
    ends[1]._gpu._end.wait = lambda timeout_s: False  # type: ignore[union-attr,method-assign]
    (error,) = on_ranks(range(2), lambda rank: ends[rank].run()).values()
    assert error.whom == "cuda:1"


# ---------------------------------------------------------------- deltas


@given(
    case=cases().map(apart),
    seed=st.integers(0, 1 << 32),
    densities=st.lists(st.sampled_from(DENSITIES), min_size=1, max_size=3),
    size=st.sampled_from([1200, 1 << 20]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages_are_the_cpus(machine: Machine, case: Case, seed: int, densities: list[float], size: int) -> None:
    """Over random layouts, versions in a row; the GPU's receivers write what a dense update brings."""
    generator, values = np.random.default_rng(seed), numbered(case[0])
    ranks = ranks_of(case, values, there=there, bucket_bytes=size)
    twin = Ranks(ranks.plan, ranks.sources, {}, bucket_bytes=size)
    ranks.full(1)
    for sender in twin.senders.values():
        sender.full(1)
    for version, density in enumerate(densities, 2):
        step(ranks, case, values, density, generator)
        twin.encode(version)
        ranks.update(version)
        for rank in ranks.destinations:
            ours, cpus = ([[m.tobytes() for m in several] for several in one.messages(rank).values()] for one in (ranks, twin))
            assert (ours, ranks.digests(rank)) == (cpus, twin.digests(rank))
        ranks.check(case[0], case[2])


def test_a_gpu_without_room_says_so_and_keeps_the_version(machine: Machine) -> None:
    """For the base; for a delta, which is refused then."""
    gc.collect()
    machine.reset(10_000)
    try:
        with pytest.raises(OutOfDeviceMemory):
            large("bfloat16", 2, there=there)
        machine.reset(TOTAL)
        ranks, shapes, wanted = large("bfloat16", 2, there=there)
        ranks.full(1)
        change(ranks.sources[0]["s"], 0.01, np.random.default_rng(1))
        ranks.encode(2)
        machine.reset(0)
        with pytest.raises(TransferError, match="no memory for a delta"):
            ranks.receive(1, ranks.messages(1))
    finally:
        machine.reset(TOTAL)
    assert ranks.receivers[1].version == 1
    ranks.receive(1, ranks.messages(1))
    ranks.receivers[1].commit(2)
    ranks.check(shapes, [wanted])
