"""Sparse deltas on one GPU: messages are the CPU's byte for byte, receivers prove, write and read what a CPU would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from delta_ranks import Ranks, change  # noqa: E402
from test_reshard_delta import DENSITIES, ITEMS, large  # noqa: E402

import asyncmoe.reshard._C as _C  # noqa: E402
from asyncmoe.errors import TransferError  # noqa: E402
from asyncmoe.reshard import DeltaDecoder, DeltaEncoder  # noqa: E402

if _C.cuda_device_count() == 0 or not torch.cuda.is_available():
    pytest.skip("no GPU, or no CUDA kernels built", allow_module_level=True)

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


class Twins:
    """An encoder and a decoder on the GPU, of what `ranks` codes and decodes on the CPU."""

    def __init__(self, ranks: Ranks, sources: Arrays, destinations: Arrays, source: int, destination: int, **how: Any) -> None:
        self.ranks, self.source, self.destination = ranks, source, destination
        stream = torch.cuda.Stream()
        self.encoder = DeltaEncoder(ranks.plan, source, stream=stream.cuda_stream, **how)
        self.decoder = DeltaDecoder(ranks.plan, destination, stream=stream.cuda_stream, **how)
        self.there, self.held = upload(sources), upload(destinations)
        torch.cuda.synchronize()
        self.encoder.bind(self.there)
        self.decoder.bind(self.held)
        self.encoder.full(1)

    def messages(self) -> list[bytes]:
        """What the encoder coded, which must be the CPU's."""
        found = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in self.encoder.sizes(self.destination)]
        for number, message in enumerate(found):
            self.encoder.put(self.destination, number, message.data_ptr())
        torch.cuda.synchronize()
        return [message.cpu().numpy().tobytes() for message in found]

    def receive(self) -> None:
        self.decoder.expect({self.source: self.encoder.sizes(self.destination)})
        for number, message in enumerate(self.messages()):
            there = torch.frombuffer(bytearray(message), dtype=torch.uint8).cuda()
            torch.cuda.synchronize()
            self.decoder.take(self.source, number, there.data_ptr())
            torch.cuda.synchronize()
        self.decoder.prove({self.source: self.encoder.digest(self.destination)})


def twins(dtype: str, item: int) -> Twins:
    ranks, _, _ = large(dtype, item)
    ranks.full(1)
    made = Twins(ranks, ranks.sources[0], ranks.destinations[1], 0, 1, bucket_bytes=1 << 19)
    made.decoder.adopt(1, ranks.digests(1))
    assert made.encoder.digest(1) == ranks.senders[0].digest(1)
    return made


def test_tables_are_there_before_they_are_used_though_the_default_stream_is_busy() -> None:
    """As when a training step is enqueued there while the sending thread makes its tables, and uses them on another stream."""
    torch.cuda._sleep(4_000_000_000)  # about two seconds of cycles
    both = twins("bfloat16", 2)
    change(both.ranks.sources[0]["s"], 0.01, np.random.default_rng(1))
    upload(both.ranks.sources[0], both.there)
    both.ranks.encode(2)
    both.encoder.encode(2, limit_bytes=1 << 40)
    assert both.messages() == [one.tobytes() for one in both.ranks.messages(1)[0]]


@ITEMS
def test_a_gpu_sends_and_receives_what_a_cpu_does(dtype: str, item: int) -> None:
    both = twins(dtype, item)
    for version, density in enumerate([*DENSITIES, 0.003, 0.3, 0.45, 0.9], 2):
        change(both.ranks.sources[0]["s"], density, np.random.default_rng(version))
        upload(both.ranks.sources[0], both.there)
        before = {name: one.cpu().numpy().copy() for name, one in both.held.items()}
        both.encoder.encode(version, limit_bytes=1 << 40)
        both.receive()
        assert same(both.held, before)
        both.decoder.commit(version)
        both.ranks.update(version)
        assert both.messages() == [one.tobytes() for one in both.ranks.messages(1)[0]]
        assert same(both.held, both.ranks.destinations[1])


def test_what_somebody_else_wrote_is_found() -> None:
    both = twins("bfloat16", 2)
    both.ranks.sources[0]["s"].reshape(-1)[3] ^= 1
    upload(both.ranks.sources[0], both.there)
    both.encoder.encode(2, limit_bytes=1 << 40)
    both.held["half0"][3 * 2] ^= 2
    with pytest.raises(TransferError, match="does not turn the current memory into the new version"):
        both.receive()
