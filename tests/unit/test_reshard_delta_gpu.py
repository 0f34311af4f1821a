"""Deltas of weights on a GPU, on the stand-in of one: kernels are emulated, messages must be the CPU's byte for byte."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
from delta_ranks import Ranks, change
from device_standin import TOTAL, Machine, machine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_ranks import Arrays, blank, filled, numbered
from test_reshard_delta import DENSITIES, Case, large, matrix
from test_reshard_delta_float8 import Quantised, stepped
from test_reshard_random import cases

from asyncmoe.errors import InvariantBroken, OutOfDeviceMemory, TransferError, WaitTimeout
from asyncmoe.reshard import DeltaReceiver, DeltaSender, delta_gpu, plan
from asyncmoe.reshard.delta_gpu import BaseMemory, DeltaGpu
from asyncmoe.reshard.gpu import nothing_to_give
from asyncmoe.reshard.memory import DeviceBuffer

__all__ = ["machine"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")
MEMORIES: tuple[BaseMemory, ...] = ("device", "host")


def there(arrays: Mapping[str, np.ndarray]) -> dict[str, DeviceBuffer]:
    """Arrays as if they were on a GPU, in the same memory."""
    return {name: DeviceBuffer(array, array.ctypes.data, array.nbytes, "cuda:1") for name, array in arrays.items()}


class OnGpu(Ranks):
    """Ranks whose senders and receivers think that their arrays are on a GPU, beside senders that read the same arrays as a CPU's."""

    def __init__(self, case: Ranks, memory: BaseMemory, **how: int) -> None:
        super().__init__(case.plan, case.sources, case.destinations, **how)
        self.twins = self.senders
        self.senders = {rank: DeltaSender(self.plan, rank, memory=memory, **how) for rank in self.sources}
        for rank, sender in self.senders.items():
            sender.bind(there(self.sources[rank]))
        for rank, receiver in self.receivers.items():
            receiver.bind(there(self.destinations[rank]))

    def full(self, version: int) -> None:
        for twin in self.twins.values():
            twin.full(version)
            twin.commit()
        super().full(version)

    def encode(self, version: int) -> None:
        for rank, sender in self.senders.items():
            twin = self.twins[rank]
            assert sender.encode(version) == twin.encode(version)
            for destination in self.destinations:
                ours, theirs = sender.messages(destination), twin.messages(destination)
                assert [one.tobytes() for one in ours] == [one.tobytes() for one in theirs]
                assert sender.contribution(destination) == twin.contribution(destination)

    def commit(self, version: int) -> None:
        super().commit(version)
        for twin in self.twins.values():
            twin.commit()


def on_gpu(case: Case, values: Arrays, memory: BaseMemory, **how: int) -> OnGpu:
    shapes, source, destination = case
    sources = {layout.rank: filled(layout, values) for layout in source}
    bare = Ranks(plan(shapes, source, destination), sources, {layout.rank: blank(layout) for layout in destination}, **how)
    return OnGpu(bare, memory, **how)


@pytest.mark.parametrize("memory", MEMORIES)
@given(
    case=cases(),
    seed=st.integers(0, 1 << 32),
    densities=st.lists(st.sampled_from(DENSITIES), min_size=1, max_size=3),
    size=st.sampled_from([8, 64, 1 << 20]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages_are_the_cpus(machine: Machine, memory: BaseMemory, case: Case, seed: int, densities: list[float], size: int) -> None:
    """Over random layouts, versions in a row; the GPU's receivers write what a dense update brings."""
    shapes, source, destination = case
    generator, values = np.random.default_rng(seed), numbered(shapes)
    ranks = on_gpu(case, values, memory, message_bytes=size)
    ranks.full(1)
    ranks.check(shapes, destination)
    for version, density in enumerate(densities, 2):
        for tensor in values.values():
            change(tensor, density, generator)
        for layout in source:
            for name, array in filled(layout, values).items():
                ranks.sources[layout.rank][name][...] = array
        ranks.encode(version)
        ranks.commit(version)
        ranks.check(shapes, destination)


@pytest.mark.parametrize(("dtype", "item"), [("uint8", 1), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_every_density_of_every_item(machine: Machine, dtype: str, item: int) -> None:
    """Sparse blocks, dense ones and those between; runs of half a row."""
    bare, shapes, wanted = large(dtype, item, 260, 1000)
    ranks = OnGpu(bare, "device", message_bytes=1 << 19)
    ranks.full(1)
    for version, density in enumerate([*DENSITIES, 0.003, 0.3, 0.45, 0.9], 2):
        change(ranks.sources[0]["s"], density, np.random.default_rng(version))
        ranks.encode(version)
        ranks.commit(version)
    ranks.check(shapes, [wanted])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("float8", [False, True], ids=["bfloat16 served", "float8 served"])
def test_casts_on_the_way(machine: Machine, dtype: str, float8: bool) -> None:
    """A GPU packs with its own kernel: its messages are the CPU's, and its receivers take them from the CPU's senders."""
    ranks = Quantised(dtype, float8)
    ours = {rank: DeltaSender(ranks.plan, rank, message_bytes=1 << 16) for rank in ranks.held}
    for rank, sender in ours.items():
        sender.bind(there(ranks.held[rank]))
    ranks.full(1)
    for sender in ours.values():
        sender.full(1)
        sender.commit()
    for rank in ranks.got:
        taken = DeltaReceiver(ranks.plan, rank, message_bytes=1 << 16)
        taken.bind(there(ranks.got[rank]))
        taken.adopt(1, ranks.receivers[rank].digest)
        ranks.receivers[rank] = taken
    for version, (size, share) in enumerate([(1e-2, 0.01), (0.0, 1.0), (0.5, 1.0)], 2):
        stepped(ranks.values, size, share, version)
        ranks.load()
        for rank, sender in ours.items():
            theirs = ranks.senders[rank]
            assert sender.encode(version) == theirs.encode(version)
            theirs_made = {to: [one.tobytes() for one in theirs.messages(to)] for to in ranks.got}
            assert {to: [one.tobytes() for one in sender.messages(to)] for to in ranks.got} == theirs_made
            theirs.abandon()
            sender.commit()
        ranks.delta(version)


# ---------------------------------------------------------------- what goes wrong


def small(memory: BaseMemory = "device") -> OnGpu:
    source, got = np.zeros(5000, np.uint16), np.zeros(5000, np.uint16)
    made = plan({"w": (5000,)}, [matrix(0, (5000,))], [matrix(1, (5000,))])
    ranks = OnGpu(Ranks(made, {0: {"s": source}}, {1: {"s": got}}), memory)
    ranks.full(1)
    return ranks


def test_memory_that_somebody_else_wrote_is_found_before_anything_is_written(machine: Machine) -> None:
    ranks = small()
    ranks.sources[0]["s"][7] = 1
    ranks.encode(2)
    ranks.stage(1)
    ranks.destinations[1]["s"][7] = 5
    with pytest.raises(TransferError, match="does not make version 2 of what lies in memory"):
        ranks.receivers[1].prove(2)
    assert ranks.destinations[1]["s"][7] == 5
    assert ranks.receivers[1].version is None


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_base_that_changed_in_memory_is_none(machine: Machine, memory: BaseMemory) -> None:
    ranks = small(memory)
    ranks.sources[0]["s"][7] = 1
    ranks.encode(2)
    kept = ranks.senders[0]._streams[0].kept
    assert kept is not None
    if memory == "host":
        kept._kept[14] ^= 1  # type: ignore[attr-defined]
    else:
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 16).from_address(kept._there.address))[14] ^= 1  # type: ignore[attr-defined]
    with pytest.raises(InvariantBroken, match="or its base, changed in memory"):
        ranks.senders[0].commit()
    assert ranks.senders[0].base is None


def test_a_gpu_without_room_for_the_base_says_so(machine: Machine) -> None:
    source = np.zeros(5000, np.uint16)
    made = plan({"w": (5000,)}, [matrix(0, (5000,))], [matrix(1, (5000,))])
    gc.collect()
    machine.reset(3 * 4096 + 10000)
    try:
        sender = DeltaSender(made, 0)
        with pytest.raises(OutOfDeviceMemory):
            sender.bind(there({"s": source}))
        machine.reset(TOTAL)
        sender.bind(there({"s": source}))
        sender.full(1)
    finally:
        machine.reset(TOTAL)


def test_a_gpu_without_room_for_a_payload_refuses_the_delta_and_keeps_the_version(machine: Machine) -> None:
    ranks = small()
    ranks.sources[0]["s"][:] = 1
    ranks.encode(2)
    ranks.stage(1)
    machine.reset(0)
    try:
        with pytest.raises(TransferError, match="memory of cuda:1 for messages: got 0"):
            ranks.receivers[1].prove(2)
    finally:
        machine.reset(TOTAL)
    assert (ranks.receivers[1].version, ranks.receivers[1].staged_bytes) == (1, 0)
    ranks.commit(2)
    assert (ranks.destinations[1]["s"] == 1).all()


def test_pinned_memory_is_lent_again_and_does_not_pile_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, unit = DeltaGpu("cuda:1", 0, nothing_to_give), 64 << 10
    made: list[int] = []
    pinned = gpu.pinned
    monkeypatch.setattr(gpu, "pinned", lambda nbytes: made.append(nbytes) or pinned(nbytes))
    for sizes in ([10, unit + 1, 5], [unit, 2 * unit, 1], [3, 4]):
        lent = [gpu.lend(size) for size in sizes]
        assert [len(one) for one in lent] == sizes
        assert len({int(one.ctypes.data) for one in lent}) == len(sizes)
        gpu.take_back()
    assert made == [unit, 2 * unit, unit], "the second and third version pin nothing"
    gpu.lend(3 * unit)
    assert made[3:] == [3 * unit]
    gpu.take_back()
    assert sum(len(one) for one in gpu._spare) == 5 * unit, "the largest gave way"


def test_memory_of_a_device_that_hangs_is_never_freed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_gpu, "_hung", hung := [])
    gpu = DeltaGpu("cuda:1", 0, nothing_to_give)
    monkeypatch.setattr(gpu._done, "wait", lambda timeout_s: False, raising=False)
    lent = weakref.ref(gpu.lend(9).base)
    with pytest.raises(WaitTimeout, match="the kernels of a delta"):
        gpu.wait()
    del gpu
    gc.collect()
    assert lent() is not None
    assert len(hung) == 1


def test_staged_messages_live_as_long_as_their_arrays(machine: Machine) -> None:
    gpu = DeltaGpu("cuda:1", 0, nothing_to_give)
    array = gpu.pinned(1000)
    array[:] = 7
    part = array[500:]
    del array
    gc.collect()
    assert (part == 7).all()
