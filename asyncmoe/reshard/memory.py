"""Memory addresses of arrays: from NumPy, the buffer protocol, or torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import ITEM_BYTES, Storage

Array = Any
"""A NumPy array, an object with the buffer protocol, a torch tensor, or a `DeviceBuffer`; row-major."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a row-major array, valid only while the array exists."""

    address: int
    nbytes: int
    dtype: str
    device: str
    """"cpu", or "cuda:0"."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Bytes, usually on a GPU, outside any array library: part of the memory that `owner` keeps alive."""

    owner: object
    address: int
    nbytes: int
    device: str

    def __getitem__(self, part: slice) -> DeviceBuffer:
        start, stop, _ = part.indices(self.nbytes)
        return DeviceBuffer(self.owner, self.address + start, max(0, stop - start), self.device)


def memory_of(array: Array, what: str, *, write: bool = False) -> Memory:
    """Return the memory of an array.

    Args:
        array: see `Array`. Gradients are not tracked: a torch parameter is treated as its detached data. Its device need not be the
            calling thread's current one.
        what: name of the array in errors.
        write: whether the array will be written.

    Raises:
        LayoutError: not an array, not row-major, read-only although `write`, or on a device that is neither CPU nor CUDA.
    """
    if isinstance(array, DeviceBuffer):
        return Memory(array.address, array.nbytes, "uint8", array.device, (array.nbytes,))
    if hasattr(array, "data_ptr") and hasattr(array, "layout"):
        return _torch_memory(array, what)
    return _numpy_memory(array, what, write)


def storage_memory(array: Array, storage: Storage, what: str, *, write: bool = False) -> Memory:
    """Return the memory of an array for `storage`. Arrays of uint8, or of unsigned integers of the element size, count as raw bits.

    The array has the storage's shape, except for dimensions of size 1 and a last dimension counted in bytes; or it is flat.

    Raises:
        LayoutError: as `memory_of`; or the array's dtype, number of bytes or shape does not match the storage.
    """
    memory, item = memory_of(array, what, write=write), ITEM_BYTES[storage.dtype]
    if memory.dtype not in (storage.dtype, f"uint{8 * item}", "uint8"):
        raise LayoutError(what, got=memory.dtype, expected=storage.dtype)
    if memory.nbytes != storage.nbytes:
        raise LayoutError(what, got=f"{memory.nbytes} bytes", expected=f"{storage.nbytes} bytes, {storage.dtype}{list(storage.shape)}")
    in_bytes = memory.dtype == "uint8" and item > 1 and storage.shape
    wanted = (*storage.shape[:-1], storage.shape[-1] * item) if in_bytes else storage.shape
    if len(memory.shape) > 1 and [n for n in memory.shape if n != 1] != [n for n in wanted if n != 1]:
        raise LayoutError(what, got=f"shape {list(memory.shape)}", expected=f"{list(wanted)}, or a flat array")
    return memory


def memories_of(storages: Mapping[str, Storage], arrays: Mapping[str, Array] | None, what: str, *, write: bool) -> dict[str, Memory]:
    """Return the memory of each storage's array, keyed by the array's name in errors: `what` and the storage's name.

    Raises:
        LayoutError: an array is missing, or as `storage_memory`.
    """
    held = {} if arrays is None else arrays
    if missing := [name for name in storages if name not in held]:
        raise LayoutError(f"{what} {missing[0]}", got="nothing", expected=f"an array for each of {len(storages)} storages")
    return {f"{what} {name}": storage_memory(held[name], one, f"{what} {name}", write=write) for name, one in storages.items()}


def check_apart(read: Mapping[str, Memory], written: Mapping[str, Memory]) -> None:
    """Raise LayoutError if written arrays, keyed by name, share memory with each other or with read arrays."""
    spans = [(m.device, m.address, m.nbytes, of is written, name) for of in (read, written) for name, m in of.items() if m.nbytes]
    furthest = furthest_written = ("", 0, "")  # device, end and name of the array that reaches furthest so far
    for device, begin, nbytes, writes, name in sorted(spans):
        other = furthest if writes else furthest_written
        if (device, begin) < other[:2]:
            raise LayoutError(name, got=f"memory that is also in {other[2]}", expected="memory of its own, because it is written to")
        furthest = max(furthest, (device, begin + nbytes, name))
        furthest_written = furthest if writes else furthest_written


def one_device(devices: Iterable[str], what: str) -> str:
    """Return the common device, or "cpu" if there is none; raise LayoutError if there are several."""
    found = sorted(set(devices)) or ["cpu"]
    if len(found) > 1:
        raise LayoutError(what, got=" and ".join(found), expected="all on one device")
    return found[0]


def addresses_of(memories: Iterable[Memory]) -> np.ndarray:
    """Return addresses as int64[n], the form that the extension expects."""
    return np.array([memory.address for memory in memories], np.uint64).view(np.int64)


def digest(array: Array, *, threads: int = 0) -> int:
    """Return the 64-bit digest of an array's bytes in host memory; the algorithm is defined in `csrc/digest.h`.

    Raises:
        LayoutError: as `memory_of`; or the array is not in host memory.
    """
    memory = memory_of(array, "array to digest")
    if memory.device != "cpu":
        raise LayoutError("array to digest", got=memory.device, expected="cpu")
    return int(_C.digest(memory.address, memory.nbytes, threads))


def _numpy_memory(array: Array, what: str, write: bool) -> Memory:
    try:
        view = array if isinstance(array, np.ndarray) else np.asarray(memoryview(array))
    except TypeError:
        raise LayoutError(what, got=type(array).__name__, expected="an array (NumPy, buffer protocol or torch)") from None
    if not view.flags.c_contiguous:
        raise LayoutError(what, got="an array with gaps or transposed", expected="a contiguous, row-major array")
    if write and not view.flags.writeable:
        raise LayoutError(what, got="a read-only array", expected="a writable array")
    if not view.dtype.isnative:
        raise LayoutError(what, got=f"{view.dtype.str}, foreign byte order", expected="the machine's byte order")
    return Memory(view.__array_interface__["data"][0], view.nbytes, view.dtype.name, "cpu", view.shape)


def _torch_memory(array: Array, what: str) -> Memory:
    """Avoid DLPack, with which torch exports only tensors on the thread's current device (torch/_tensor.py, `Tensor.__dlpack__`)."""
    if str(array.layout) != "torch.strided" or not array.is_contiguous():
        raise LayoutError(what, got="an array with gaps or transposed", expected="a contiguous, row-major array")
    if array.device.type not in ("cpu", "cuda"):
        raise LayoutError(what, got=f"device {array.device}", expected="memory of the CPU or of a CUDA device")
    address, held = int(array.data_ptr()), array.untyped_storage().nbytes()
    needed = (array.storage_offset() + array.numel()) * array.element_size()
    if held < needed:  # FSDP frees it with `untyped_storage().resize_(0)`
        raise LayoutError(what, got=f"a tensor whose storage has {held} of {needed} bytes", expected="an array that has memory")
    dtype, device = str(array.dtype).removeprefix("torch."), str(array.device)
    return Memory(address, array.numel() * array.element_size(), dtype, device, tuple(array.shape))
