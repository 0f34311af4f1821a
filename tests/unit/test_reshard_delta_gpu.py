"""Deltas of weights on a GPU, on the stand-in of one: kernels are emulated, messages must be the CPU's byte for byte."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping

import numpy as np
import pytest
from delta_ranks import Ranks, change
from device_standin import TOTAL, Machine, machine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_ranks import numbered
from test_reshard_delta import DENSITIES, Case, apart, large, ranks_of, step
from test_reshard_random import cases

from asyncmoe.errors import OutOfDeviceMemory, TransferError
from asyncmoe.reshard.memory import DeviceBuffer

__all__ = ["machine"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")


def there(arrays: Mapping[str, np.ndarray]) -> dict[str, DeviceBuffer]:
    """Arrays as if they were on a GPU, in the same memory."""
    return {name: DeviceBuffer(array, array.ctypes.data, array.nbytes, "cuda:1") for name, array in arrays.items()}


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
