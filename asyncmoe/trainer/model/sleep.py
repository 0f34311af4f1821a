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

from asyncmoe import storage
from asyncmoe.config import Config
from asyncmoe.occupancy import Held, MemoryPart
from asyncmoe.platform.megatron.any_layout import optimizers
from asyncmoe.trainer.model.gpt import Model

Storage = torch.UntypedStorage
_PARTS = {
    "optimizer": MemoryPart.STATE,
    "gradients": MemoryPart.STATE,
    "frozen": MemoryPart.STATE,  # weights under adapters: they never change, so their contents are copied once
    "parameters": MemoryPart.PARAMETERS,
    "copies": MemoryPart.PARAMETERS,
}
_EMPTY = ("gradients", "copies")
"""What comes back as zeros."""


class Sleeper:
    """The memory of one rank's model and optimizer; it is held initially. Parts that `trainer.sleep` leaves out are held always.

    Args:
        config: a CPU's file is created in `run.dir`, without a name.
        copies: returns tensors that hold nothing while the parameters are away.
    """

    def __init__(self, config: Config, model: Model, optimizer: Any, copies: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._model, self._optimizers, self._copies = model, optimizers(optimizer), copies
        self._keeper: _Keeper = _Pinned() if model.mesh.device.type == "cuda" else _File(config.run.dir)
        chosen = {*config.trainer.sleep, "copies", *(("frozen",) if "parameters" in config.trainer.sleep else ())}
        self._parts = {name: part for name, part in _PARTS.items() if name in chosen}
        self._kept: set[str] = set()
        self._released: dict[str, list[tuple[Storage, int]]] = {}

    def hold(self, held: Held) -> None:
        """Release the trainer's memory that is not in `held`, and take back the rest.

        Raises:
            StorageError: the disk is full, or fails.
        """
        for name in [name for name, part in self._parts.items() if part not in held and name not in self._released]:
            self._release(name)
        _trim(self._model.mesh.device)
        for name in [name for name in self._released if self._parts[name] in held]:
            self._take_back(name)

    def _release(self, name: str) -> None:
        storages = list(self._storages_of(name).values())
        if name not in (*_EMPTY, *self._kept):
            self._keeper.keep(name, storages)
        if name == "frozen":
            self._kept.add(name)
        self._released[name] = [(one, one.nbytes()) for one in storages]
        for one in storages:
            one.resize_(0)

    def _take_back(self, name: str) -> None:
        found = self._released.pop(name)
        for one, nbytes in found:
            one.resize_(nbytes)
            if name in _EMPTY:
                _bytes(one).zero_()
        if name not in _EMPTY:
            self._keeper.restore(name, [one for one, _ in found])

    def _storages_of(self, name: str) -> dict[int, Storage]:
        if name == "copies":
            return self._storages(self._copies())
        if name == "gradients":
            return self._storages(grad for one in self._each(True) if (grad := getattr(one, "main_grad", None)) is not None)
        trained = self._storages((*self._each(True), *(one for chunk in self._model.chunks for one in chunk.buffers())))
        if name == "parameters":
            return trained
        if name == "frozen":
            return {place: one for place, one in self._storages(self._each(False)).items() if place not in trained}
        others = trained | self._storages_of("gradients")
        return {place: one for place, one in self._state().items() if place not in others}

    def _each(self, trained: bool) -> Iterator[torch.Tensor]:
        return (one for chunk in self._model.chunks for one in chunk.parameters() if one.requires_grad is trained)

    def _state(self) -> dict[int, Storage]:
        """Adam's averages and the masters, which the optimizer may share with the model."""
        groups = [one.optimizer for one in self._optimizers]
        masters = (parameter for one in groups for group in one.param_groups for parameter in group["params"])
        averages = (value for one in groups for state in one.state.values() for value in state.values())
        return self._storages(tensor for tensor in (*masters, *averages) if isinstance(tensor, torch.Tensor))

    def _storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, Storage]:
        """Return the storages on this rank's device by the addresses of their C++ objects, without empty ones and those of others, such as
        NumPy's."""
        device = self._model.mesh.device.type
        each = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
        return {one._cdata: one for one in each if one.nbytes() and one.resizable()}


class _Keeper(Protocol):
    def keep(self, name: str, storages: list[Storage]) -> None: ...

    def restore(self, name: str, storages: list[Storage]) -> None: ...


class _Pinned:
    """Keeps contents in pinned host memory."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def keep(self, name: str, storages: list[Storage]) -> None:
        for at, one in enumerate(storages):
            buffer = self._buffers.get((name, at))
            if buffer is None:
                buffer = self._buffers[name, at] = _pinned(one.nbytes())
            buffer.copy_(_bytes(one), non_blocking=True)
        torch.cuda.synchronize()

    def restore(self, name: str, storages: list[Storage]) -> None:
        for at, one in enumerate(storages):
            _bytes(one).copy_(self._buffers[name, at], non_blocking=True)
        torch.cuda.synchronize()


def _pinned(nbytes: int) -> torch.Tensor:
    """Return page-locked uint8[nbytes]; with `pin_memory`, PyTorch would take the next power of two."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0))  # type: ignore[no-untyped-call]
    return buffer


class _File:
    """Keeps contents in a file for each name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {name: tempfile.TemporaryFile(dir=folder) for name in _PARTS}  # noqa: SIM115  as long-lived as the trainer

    def keep(self, name: str, storages: list[Storage]) -> None:
        file = self._files[name]
        file.seek(0)
        with storage.writing("what the sleeping trainer keeps", self._folder):
            for one in storages:
                file.write(_view(one))
            file.flush()
            os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else its pages stay in memory

    def restore(self, name: str, storages: list[Storage]) -> None:
        file = self._files[name]
        file.seek(0)
        for one in storages:
            file.readinto(_view(one))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes(one: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=one.device).set_(one)


def _view(one: Storage) -> memoryview:
    """View a storage in host memory; one that NumPy views can never be resized."""
    return memoryview((ctypes.c_char * one.nbytes()).from_address(one.data_ptr())).cast("B")


def _trim(device: torch.device) -> None:
    """Give memory that is free in this process back to the machine."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)
