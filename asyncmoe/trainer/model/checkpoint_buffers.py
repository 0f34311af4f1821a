"""Host memory of a rank that holds what it saves while training goes on. It is kept between saves, so only the first one allocates it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncmoe.platform.megatron.snapshot import Shard

_cuda: Any = torch.cuda
_ALIGNED = 64
"""Bytes; a shard begins at a multiple of it, as in the files of torch.save."""


class Buffers:
    """A second copy of a rank's shards.

    Args:
        shards: what is copied; their memory stays where it is.
        device: of the shards. On a GPU the host memory is registered with CUDA, so that a copy takes no thread of the host.

    Attributes:
        nbytes: size of the memory.
        copies: a copy of each shard, in order, with a storage of its own size, because torch.save writes whole storages.
    """

    def __init__(self, shards: Sequence[Shard], device: torch.device) -> None:
        self._live = [shard.live for shard in shards]
        places, self.nbytes = _places(self._live)
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8)
        self._stream: Any = _cuda.Stream(device) if device.type == "cuda" else None
        self._copied: Any = None
        self._registered = False
        if self._stream is not None and self.nbytes:
            # Memory that pin_memory=True allocates is rounded up to a power of two. Unregistered, the copies are slower, and as exact.
            self._registered = int(_cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self.nbytes, 0)) == 0
        array: Any = self._memory.numpy()
        held = memoryview(array) if self.nbytes else memoryview(b"")
        self.copies = [_own(held, place, live) for place, live in zip(places, self._live, strict=True)]

    def copy(self) -> None:
        """Begin to copy all shards as they are now; without a GPU, copy them. Nothing may change them before `wait_on_device`."""
        if self._stream is None:
            torch._foreach_copy_(self.copies, self._live)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(self.copies, self._live, non_blocking=True)
            self._copied = _cuda.Event()
            self._copied.record(self._stream)

    def wait_on_device(self) -> None:
        """Have the work that is put on the device from now on wait for the copy; the host goes on."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait for the copy. For the thread that reads `copies`."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Give the memory back; no thread may use `copies` any more."""
        if self._registered:
            _cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._registered = False
        self._live, self.copies, self._memory = [], [], torch.empty(0, dtype=torch.uint8)


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return where each tensor begins, and the bytes of all."""
    places, total = [], 0
    for tensor in tensors:
        places.append(total)
        total += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    return places, total


def _own(held: memoryview, place: int, live: torch.Tensor) -> torch.Tensor:
    if not live.numel():
        return torch.empty(live.shape, dtype=live.dtype)
    return torch.frombuffer(held, dtype=live.dtype, count=live.numel(), offset=place).view(live.shape)
