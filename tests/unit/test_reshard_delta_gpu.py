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
from test_reshard_delta import DENSITIES, ITEMS, Case, apart, large, ranks_of, step
from test_reshard_delta_float8 import Quantised, stepped
from test_reshard_random import cases

from asyncmoe.errors import OutOfDeviceMemory, TransferError
from asyncmoe.reshard.memory import DeviceBuffer

__all__ = ["machine"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")


def there(arrays: Mapping[str, np.ndarray]) -> dict[str, DeviceBuffer]:
    """Arrays as if they were on a GPU, in the same memory."""
    return {name: DeviceBuffer(array, array.ctypes.data, array.nbytes, "cuda:1") for name, array in arrays.items()}


def same_messages(ours: Ranks, theirs: Ranks) -> None:
    for rank in ours.destinations:
        mine, others = ours.messages(rank), theirs.messages(rank)
        assert {r: [m.tobytes() for m in several] for r, several in mine.items()} == {
            r: [m.tobytes() for m in several] for r, several in others.items()
        }
        assert ours.digests(rank) == theirs.digests(rank)


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
        same_messages(ranks, twin)
        ranks.check(case[0], case[2])


@ITEMS
def test_every_density_of_every_item(machine: Machine, dtype: str, item: int) -> None:
    """Sparse blocks, dense ones and those between; runs of half a row."""
    ranks, shapes, wanted = large(dtype, item, 260, 1000, there=there)
    ranks.full(1)
    for version, density in enumerate([*DENSITIES, 0.003, 0.3, 0.45, 0.9], 2):
        change(ranks.sources[0]["s"], density, np.random.default_rng(version))
        ranks.update(version)
    ranks.check(shapes, [wanted])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("float8", [False, True], ids=["bfloat16 served", "float8 served"])
def test_casts_on_the_way(machine: Machine, dtype: str, float8: bool) -> None:
    """A GPU packs with its own kernel: its messages are the CPU's."""
    ours = Quantised(dtype, float8, there)
    twin = Ranks(ours.plan, ours.held, {}, bucket_bytes=1 << 17)
    ours.full(1)
    for sender in twin.senders.values():
        sender.full(1)
    for version, (size, share) in enumerate([(1e-2, 0.01), (0.0, 1.0), (0.5, 1.0)], 2):
        stepped(ours.values, size, share, version)
        ours.delta(version)
        twin.encode(version)
        same_messages(ours.ranks, twin)


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
