"""Memory addresses of arrays from any library: NumPy, the buffer protocol, or DLPack (torch, JAX, CuPy)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import ITEM_BYTES, Storage

Array = Any
"""A NumPy array, or an object with the buffer protocol or `__dlpack__`; row-major."""

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
"""DLPack's type codes (dlpack.h, DLDataTypeCode)."""
_FLOAT8 = {10: "float8_e4m3fn", 12: "float8_e5m2"}
"""DLPack's type codes of float8, each of which is one dtype."""
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}
"""DLPack's device types (dlpack.h, DLDeviceType); pinned memory counts as host memory, managed memory as a GPU's."""

_SOMEWHERE = "memory of the CPU or of a CUDA device"


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a row-major array, valid only as long as the array exists."""

    address: int
    nbytes: int
    dtype: str
    device: str
    """"cpu", or "cuda:0"."""


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Bytes, usually on a GPU, outside any array library: a part of the memory that `owner` keeps alive."""

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
        return Memory(array.address, array.nbytes, "uint8", array.device)
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        return _numpy_memory(array, what, write)
    if hasattr(array, "data_ptr") and hasattr(array, "layout"):
        return _torch_memory(array, what)
    address, elements, device, index, code, bits, row_major = _C.inspect(_capsule(array, what))
    if not row_major:
        raise LayoutError(what, got="an array with gaps or transposed", expected="a contiguous, row-major array")
    if device not in _DEVICES:
        raise LayoutError(what, got=f"DLPack device type {device}", expected=_SOMEWHERE)
    kind = _KINDS.get(code, f"code{code}_")
    dtype = _FLOAT8.get(code) or ("bool" if kind == "bool" else f"{kind}{bits}")
    name = _DEVICES[device]
    return Memory(address, elements * bits // 8, dtype, name if name == "cpu" else f"{name}:{index}")


def storage_memory(array: Array, storage: Storage, what: str, *, write: bool = False) -> Memory:
    """Return the memory of an array for `storage`. Arrays of uint8, or of unsigned integers of the element size, are taken as raw bits.

    Raises:
        LayoutError: as `memory_of`; or the array's dtype or number of bytes does not match the storage.
    """
    memory = memory_of(array, what, write=write)
    raw = f"uint{8 * ITEM_BYTES[storage.dtype]}"
    if memory.dtype not in (storage.dtype, raw, "uint8"):
        raise LayoutError(what, got=memory.dtype, expected=storage.dtype)
    if memory.nbytes != storage.nbytes:
        raise LayoutError(what, got=f"{memory.nbytes} bytes", expected=f"{storage.nbytes} bytes, {storage.dtype}{list(storage.shape)}")
    return memory


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
        raise LayoutError(what, got=type(array).__name__, expected="an array (NumPy, buffer protocol or DLPack)") from None
    if not view.flags.c_contiguous:
        raise LayoutError(what, got="an array with gaps or transposed", expected="a contiguous, row-major array")
    if write and not view.flags.writeable:
        raise LayoutError(what, got="a read-only array", expected="a writable array")
    if not view.dtype.isnative:
        raise LayoutError(what, got=f"{view.dtype.str}, foreign byte order", expected="the machine's byte order")
    return Memory(view.__array_interface__["data"][0], view.nbytes, view.dtype.name, "cpu")


def _torch_memory(array: Array, what: str) -> Memory:
    """Avoid DLPack, through which torch exports only tensors on the thread's current device (torch/_tensor.py, `Tensor.__dlpack__`)."""
    if str(array.layout) != "torch.strided" or array.is_conj() or array.is_neg():
        raise LayoutError(what, got=f"{array.layout}, or values to be conjugated or negated", expected="an array as DLPack has them")
    if not array.is_contiguous():
        raise LayoutError(what, got="an array with gaps or transposed", expected="a contiguous, row-major array")
    if array.device.type not in ("cpu", "cuda"):
        raise LayoutError(what, got=f"device {array.device}", expected=_SOMEWHERE)
    try:
        address = int(array.data_ptr())
    except RuntimeError as error:  # functional and fake tensors have no memory
        raise LayoutError(what, got=str(error), expected="an array that has memory") from error
    return Memory(address, array.numel() * array.element_size(), str(array.dtype).removeprefix("torch."), str(array.device))


@contextmanager
def _current(index: int) -> Iterator[None]:
    before = _C.swap_device(index)
    try:
        yield
    finally:
        _C.restore_device(before)


def _capsule(array: Array, what: str) -> object:
    detached = array.detach() if hasattr(array, "detach") else array
    try:
        kind, index = detached.__dlpack_device__()
        if _DEVICES.get(int(kind)) != "cuda":
            return detached.__dlpack__()
        there: AbstractContextManager[None] = _current(int(index)) if _C.CUDA else nullcontext()
        with there:
            return detached.__dlpack__(stream=-1)  # -1: no synchronisation, as only the address is used
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(what, got=str(error), expected="an array that DLPack can export") from error
