"""Sparse deltas on one GPU: messages are the CPU's byte for byte, receivers prove, write and read what a CPU would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from asyncmoe.reshard.delta_gpu import BaseMemory  # noqa: E402
from delta_ranks import change  # noqa: E402
from test_reshard_delta import DENSITIES, large  # noqa: E402
from test_reshard_delta_float8 import Quantised, stepped  # noqa: E402

import asyncmoe.reshard._C as _C  # noqa: E402
from asyncmoe.errors import TransferError  # noqa: E402
from asyncmoe.reshard import DeltaReceiver, DeltaSender  # noqa: E402

if _C.cuda_device_count() == 0 or not torch.cuda.is_available():
    pytest.skip("no GPU, or no CUDA kernels built", allow_module_level=True)

MEMORIES: tuple[BaseMemory, ...] = ("device", "host")
Arrays = dict[str, np.ndarray]


def upload(arrays: Arrays, there: dict[str, Any] | None = None) -> dict[str, Any]:
    """Arrays as bytes on the GPU, or into those that are there."""
    made = {name: torch.from_numpy(array.reshape(-1).view(np.uint8)) for name, array in arrays.items()}
    if there is None:
        return {name: array.cuda() for name, array in made.items()}
    for name, array in made.items():
        there[name].copy_(array)
    torch.cuda.synchronize()
    return there


def same(there: dict[str, Any], arrays: Arrays) -> bool:
    return all(there[name].cpu().numpy().tobytes() == array.tobytes() for name, array in arrays.items())


def test_tables_are_there_before_they_are_used_though_the_default_stream_is_busy() -> None:
    """As when a training step is enqueued there while the sending thread makes its tables, and uses them on another stream."""
    ranks, _, _ = large("bfloat16", 2)
    how = {"message_bytes": 1 << 19}
    ranks.full(1)
    sources, held = upload(ranks.sources[0]), upload(ranks.destinations[1])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda._sleep(4_000_000_000)  # about two seconds of cycles
    sender = DeltaSender(ranks.plan, 0, stream=stream.cuda_stream, **how)
    receiver = DeltaReceiver(ranks.plan, 1, stream=stream.cuda_stream, **how)
    sender.bind(sources)
    receiver.bind(held)
    sender.full(1)
    receiver.adopt(1, ranks.receivers[1].digest)
    sender.commit()
    torch.cuda.synchronize()
    change(ranks.sources[0]["s"], 0.01, np.random.default_rng(1))
    upload(ranks.sources[0], sources)
    ranks.encode(2)
    sender.encode(2)
    assert [one.tobytes() for one in sender.messages(1)] == [one.tobytes() for one in ranks.senders[0].messages(1)]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("dtype", "item"), [("uint8", 1), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_a_gpu_sends_and_receives_what_a_cpu_does(dtype: str, item: int, memory: BaseMemory) -> None:
    ranks, _, _ = large(dtype, item)
    how = {"message_bytes": 1 << 19}
    stream = torch.cuda.Stream()
    sender = DeltaSender(ranks.plan, 0, memory=memory, stream=stream.cuda_stream, **how)
    receiver = DeltaReceiver(ranks.plan, 1, stream=stream.cuda_stream, **how)
    ranks.full(1)
    sources, held = upload(ranks.sources[0]), upload(ranks.destinations[1])
    sender.bind(sources)
    receiver.bind(held)
    sender.full(1)
    receiver.adopt(1, ranks.receivers[1].digest)
    sender.commit()
    for version, density in enumerate([*DENSITIES, 0.003, 0.3, 0.45, 0.9], 2):
        change(ranks.sources[0]["s"], density, np.random.default_rng(version))
        upload(ranks.sources[0], sources)
        ranks.encode(version)
        assert sender.encode(version) is not None
        assert [one.tobytes() for one in sender.messages(1)] == [one.tobytes() for one in ranks.senders[0].messages(1)]
        for message in sender.messages(1):
            receiver.stage(0, message)
        before = {name: one.cpu().numpy().copy() for name, one in held.items()}
        receiver.prove(version)
        assert same(held, before)
        receiver.commit(version)
        sender.commit()
        ranks.commit(version)
        assert same(held, ranks.destinations[1])
        assert receiver.digest == ranks.receivers[1].digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("float8", [False, True], ids=["bfloat16 served", "float8 served"])
def test_casts_on_the_way(dtype: str, float8: bool) -> None:
    ranks = Quantised(dtype, float8)
    ranks.full(1)
    there = {rank: upload(arrays) for rank, arrays in ranks.held.items()}
    ours = {rank: DeltaSender(ranks.plan, rank, message_bytes=1 << 16) for rank in there}
    for rank, sender in ours.items():
        sender.bind(there[rank])
        sender.full(1)
        sender.commit()
    for version, (size, share) in enumerate([(1e-2, 0.01), (0.0, 1.0), (0.5, 1.0)], 2):
        stepped(ranks.values, size, share, version)
        ranks.load()
        for rank, sender in ours.items():
            upload(ranks.held[rank], there[rank])
            theirs = ranks.senders[rank]
            assert sender.encode(version) == theirs.encode(version)
            for to in ranks.got:
                assert [one.tobytes() for one in sender.messages(to)] == [one.tobytes() for one in theirs.messages(to)]
            theirs.abandon()
            sender.commit()
        ranks.delta(version)


def test_what_somebody_else_wrote_is_found() -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    held = upload(ranks.destinations[1])
    receiver = DeltaReceiver(ranks.plan, 1, message_bytes=1 << 19)
    receiver.bind(held)
    receiver.adopt(1, ranks.receivers[1].digest)
    ranks.sources[0]["s"][3] ^= 1
    ranks.encode(2)
    for message in ranks.senders[0].messages(1):
        receiver.stage(0, message)
    held["half0"][3 * 500 * 2] ^= 2
    with pytest.raises(TransferError, match="does not make version 2 of what lies in memory"):
        receiver.prove(2)
