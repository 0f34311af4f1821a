"""Takes this rank's memory off its device while engines use it, and back (`asyncmoe.occupancy`).

Contents go to pinned host memory, allocated once, or on a CPU to a file whose pages do not stay in memory. Tensors keep their storages, so
Megatron's views of them stay valid; a storage's address changes.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncmoe.config import Config
from asyncmoe.occupancy import TRAINER, Held, MemoryPart
from asyncmoe.platform.megatron.any_layout import optimizers
from asyncmoe.trainer.model.gpt import Model

Storage = torch.UntypedStorage


class Sleeper:
    """The memory of one rank's model and optimizer; it is held initially. Parts that `trainer.sleep` leaves out are held always.

    Args:
        config: a CPU's file is created in `run.dir`, without a name.
        copies: returns tensors that hold nothing while the parameters are away.
    """

    def __init__(self, config: Config, model: Model, optimizer: Any, copies: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._model, self._optimizers, self._copies, self._chosen = model, optimizers(optimizer), copies, config.trainer.sleep
        self._keeper: _Keeper = _Pinned() if model.mesh.device.type == "cuda" else _File(config.run.dir)
        self._released: dict[MemoryPart, list[tuple[Storage, int, bool]]] = {}

    def hold(self, held: Held) -> None:
        """Release the trainer's memory that is not in `held`, and take back the rest.

        Raises:
            OSError: the file cannot be written or read.
        """
        for part in sorted(TRAINER - held - self._released.keys()):
            found = [(one, one.nbytes(), needed) for one, needed in self._releasable(part)]
            self._keeper.keep(part, [one for one, _, needed in found if needed])
            for storage, _, _ in found:
                storage.resize_(0)
            self._released[part] = found
        _trim(self._model.mesh.device)
        for part in sorted(held & self._released.keys()):
            found = self._released.pop(part)
            for storage, nbytes, needed in found:
                storage.resize_(nbytes)
                if not needed:
                    _bytes(storage).zero_()
            self._keeper.restore(part, [one for one, _, needed in found if needed])

    def _releasable(self, part: MemoryPart) -> Iterator[tuple[Storage, bool]]:
        """Yield the storages of a part, and whether their contents are needed later."""
        parameters = self._parameters()
        if part is MemoryPart.PARAMETERS:
            if "parameters" in self._chosen:
                yield from ((one, True) for one in parameters.values())
            yield from ((one, False) for one in self._storages(self._copies()).values())
            return
        gradients = self._gradients()
        if "optimizer" in self._chosen:
            yield from ((one, True) for one in self._state(parameters | gradients).values())
        if "gradients" in self._chosen:
            yield from ((one, False) for one in gradients.values())

    def _parameters(self) -> dict[int, Storage]:
        return self._storages(tensor for chunk in self._model.chunks for tensor in (*chunk.parameters(), *chunk.buffers()))

    def _gradients(self) -> dict[int, Storage]:
        parameters = (parameter for chunk in self._model.chunks for parameter in chunk.parameters())
        return self._storages(grad for one in parameters if (grad := getattr(one, "main_grad", None)) is not None)

    def _state(self, others: dict[int, Storage]) -> dict[int, Storage]:
        """Adam's averages and the masters, which the optimizer may share with the model."""
        groups = [one.optimizer for one in self._optimizers]
        masters = (parameter for one in groups for group in one.param_groups for parameter in group["params"])
        averages = (value for one in groups for state in one.state.values() for value in state.values())
        found = self._storages(tensor for tensor in (*masters, *averages) if isinstance(tensor, torch.Tensor))
        return {place: storage for place, storage in found.items() if place not in others}

    def _storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, Storage]:
        """Return the storages on this rank's device by the addresses of their C++ objects, without empty ones and those of others, such as
        NumPy's."""
        device = self._model.mesh.device.type
        each = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
        return {storage._cdata: storage for storage in each if storage.nbytes() and storage.resizable()}


class _Keeper(Protocol):
    def keep(self, part: MemoryPart, storages: list[Storage]) -> None: ...

    def restore(self, part: MemoryPart, storages: list[Storage]) -> None: ...


class _Pinned:
    """Keeps contents in pinned host memory."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[MemoryPart, int], torch.Tensor] = {}

    def keep(self, part: MemoryPart, storages: list[Storage]) -> None:
        for at, storage in enumerate(storages):
            buffer = self._buffers.get((part, at))
            if buffer is None:
                buffer = self._buffers[part, at] = _pinned(storage.nbytes())
            buffer.copy_(_bytes(storage), non_blocking=True)
        torch.cuda.synchronize()

    def restore(self, part: MemoryPart, storages: list[Storage]) -> None:
        for at, storage in enumerate(storages):
            _bytes(storage).copy_(self._buffers[part, at], non_blocking=True)
        torch.cuda.synchronize()


def _pinned(nbytes: int) -> torch.Tensor:
    """Return page-locked uint8[nbytes]; with `pin_memory`, PyTorch would take the next power of two."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0))  # type: ignore[no-untyped-call]
    return buffer


class _File:
    """Keeps contents in a file for each part."""

    def __init__(self, folder: Path) -> None:
        self._files = {part: tempfile.TemporaryFile(dir=folder) for part in TRAINER}  # noqa: SIM115  as long-lived as the trainer

    def keep(self, part: MemoryPart, storages: list[Storage]) -> None:
        file = self._files[part]
        file.seek(0)
        for storage in storages:
            file.write(_view(storage))
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else its pages stay in memory

    def restore(self, part: MemoryPart, storages: list[Storage]) -> None:
        file = self._files[part]
        file.seek(0)
        for storage in storages:
            file.readinto(_view(storage))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: Storage) -> memoryview:
    """View a storage in host memory; one that NumPy views can never be resized."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _trim(device: torch.device) -> None:
    """Give memory that is free in this process back to the machine."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)
