"""Memory saver of an engine on a machine without CUDA (--enable-memory-saver); see `cpu`.

SGLang releases and resumes memory by tag through an adapter of torch_memory_saver, which needs CUDA (sglang 0.5.23,
utils/torch_memory_saver_adapter.py). Here the kernel takes back the pages of the tensors made within a region, whose addresses stay valid.
Pages that a tensor shares with other memory stay, but no contents survive: resumed memory holds `POISON` until something writes it, as on
a GPU it holds anything. `poisoned` names what was not written.

Updates must be received in place: on a CPU, an update with staging memory replaces parameters by tensors made outside the region.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)
POISON = 0xFF
"""Every byte of resumed memory: NaN in floats, also in float8_e4m3fn, and -1 in signed integers."""
ACTION = "poisoned"
"""Action of `/weights_checker` that returns `CpuMemorySaver.poisoned` of each rank in place of checksums."""
_WEIGHTS = "weights"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(eq=False)
class _Region:
    """The storages of the tensors made within a region, by the addresses of their C++ objects, each with its first tensor's dtype.

    Attributes:
        backup: the contents while they are released; None if they are not kept.
    """

    tag: str
    backup: IO[bytes] | None
    made: dict[int, tuple[StorageWeakRef, torch.dtype]] = field(default_factory=dict)

    def alive(self) -> Iterator[tuple[torch.UntypedStorage, torch.dtype]]:
        for ref, dtype in self.made.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None and storage.nbytes():
                yield storage, dtype


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the tensors made in this thread to a region; views and results in place are in their inputs' storages."""

    def __init__(self, region: _Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # torch.tensor makes its storage unseen, and passes it to this function.
        given = () if func is torch.ops.aten.lift_fresh.default else {id_ for id_, _ in _storages((args, kwargs))}
        for id_, tensor in _storages(out):
            if id_ not in given and id_ not in self._region.made:
                self._region.made[id_] = StorageWeakRef(tensor.untyped_storage()), tensor.dtype  # type: ignore[no-untyped-call]
        return out


class CpuMemorySaver:
    """The adapter; its methods are those of SGLang's `TorchMemorySaverAdapter`."""

    enabled = True

    def __init__(self) -> None:
        self._regions: list[_Region] = []

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cuda_graph(self, **_: Any) -> AbstractContextManager[None]:
        """A CPU has no graphs."""
        return nullcontext()

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Remember the tensors made within the block, as long as they live.

        Args:
            enable_cpu_backup: write their contents to a temporary file when they are released, and read them back.
        """
        region = _Region(tag, tempfile.TemporaryFile() if enable_cpu_backup else None)  # noqa: SIM115  as long-lived as the engine
        with _Recorder(region):
            yield
        region.made = {id_: made for id_, made in region.made.items() if not made[0].expired()}  # type: ignore[no-untyped-call]
        self._regions.append(region)

    def pause(self, tag: str) -> None:
        """Give the pages of a tag's tensors to the kernel, and log how many bytes stay.

        Raises:
            OSError: the kernel refused, or the backup could not be written.
        """
        nbytes = released = 0
        for region in self._of(tag):
            for storage, _ in region.alive():
                if region.backup is not None:
                    region.backup.write(_bytes(storage).data)
                nbytes, released = nbytes + storage.nbytes(), released + _release(storage)
            if region.backup is not None:
                region.backup.flush()
                os.fdatasync(region.backup.fileno())
                os.posix_fadvise(region.backup.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else its pages stay in memory
        if nbytes:
            log.info("%s: released %d of %d bytes; the others share pages with other memory", tag, released, nbytes)

    def resume(self, tag: str) -> None:
        """Fill a tag's tensors with their backup or with poison."""
        for region in self._of(tag):
            if region.backup is not None:
                region.backup.seek(0)
            for storage, _ in region.alive():
                if region.backup is None:
                    _bytes(storage).fill(POISON)
                else:
                    region.backup.readinto(_bytes(storage).data)  # type: ignore[attr-defined]
            if region.backup is not None:
                region.backup.seek(0)
                region.backup.truncate()

    def poisoned(self, model: torch.nn.Module) -> dict[str, str]:
        """Return {name: "number of elements, of how many"} for all tensors of the weights that hold poison.

        A tensor that no module holds is named by dtype and size. A -1 in an integer tensor counts as poison.
        """
        names = defaultdict(list)
        for name, tensor in _named(model):
            names[tensor.untyped_storage()._cdata].append(name)
        found = {}
        for region in self._of(_WEIGHTS):
            for storage, dtype in region.alive():
                words = torch.empty(0, dtype=_INTEGERS[dtype.itemsize]).set_(storage)
                if count := int(torch.count_nonzero(words == -1)):
                    for name in names[storage._cdata] or [f"unnamed {dtype}[{len(words)}]"]:
                        found[name] = f"{count} of {len(words)}"
        return found

    def _of(self, tag: str) -> Iterator[_Region]:
        return (region for region in self._regions if region.tag == tag)


def _storages(values: Any) -> Iterator[tuple[int, torch.Tensor]]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
            yield value.untyped_storage()._cdata, value


def _bytes(storage: torch.UntypedStorage) -> np.ndarray:
    """View a storage's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _release(storage: torch.UntypedStorage) -> int:
    """Give the whole pages within a storage to the kernel; return their bytes.

    Pages of shared memory must leave its file: unmapped alone, they would stay in memory.
    """
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if size <= 0:
        return 0
    if _madvise(begin, size, mmap.MADV_REMOVE if storage.is_shared() else mmap.MADV_DONTNEED):
        raise OSError(code := ctypes.get_errno(), f"madvise: {os.strerror(code)}")
    return size


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors that modules hold: parameters, buffers, and other attributes."""
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}.{name}".lstrip("."), value


_SAVER = CpuMemorySaver()


def _adapt(module: ModuleType) -> None:
    owner = vars(module)["TorchMemorySaverAdapter"]
    create = owner.create
    owner.create = staticmethod(lambda enable: _SAVER if enable else create(False))


def _check(module: ModuleType) -> None:
    owner, info = vars(module)["WeightChecker"], vars(module)["ChecksumInfo"]
    original: Callable[..., Any] = owner.handle

    def handle(self: Any, action: str, *others: Any, role: str, **named: Any) -> Any:
        if action != ACTION:
            return original(self, action, *others, role=role, **named)
        place = self._parallelism_info(role=role)
        return info(checksums=_SAVER.poisoned(self._get_model()), per_gpu_checksum="", parallelism_info=place).model_dump()

    owner.handle = handle


PATCHES = {"sglang.srt.utils.torch_memory_saver_adapter": _adapt, "sglang.srt.utils.weight_checker": _check}
