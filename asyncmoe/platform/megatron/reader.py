"""Reads checkpoints without running code from them: a user who can write a checkpoint must not gain the account that loads it.

A torch_dist checkpoint holds pickles in three places, and the libraries unpickle two of them without any check:

    .metadata    names, shapes and locations of all tensors; `FileSystemReader.read_metadata` unpickles it (torch 2.13)
    __*.distcp   objects among the tensors, such as `_extra_state`; `DefaultLoadPlanner.load_bytes` loads them with `weights_only=False`
    common.pt    the rest; Megatron leaves `weights_only` to torch's default, which an environment variable turns off

Here `.metadata` may name only `METADATA`, and the other two only what torch allows for weights. The check is part of the load itself. The
patches are installed everywhere, also with a GPU.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from asyncmoe.platform.megatron.patch import gone, module

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_FLOATS = ("bfloat16", "float16", "float32", "float64", *_FLOAT8)
_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_CHECKPOINT = "torch.distributed.checkpoint"
METADATA: Mapping[str, tuple[str, ...]] = {
    "torch": ("Size", *_FLOATS, *_INTEGERS),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_CHECKPOINT}.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    f"{_CHECKPOINT}.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
}
"""Every global that `.metadata` may name, by module: those that torch and Megatron write, none of which runs a command, imports a module or
opens a file."""
METADATA_FILE, COMMON = ".metadata", "common.pt"
_EXTRA_STATE = "_extra_state"
_NAMED = re.compile(r"GLOBAL (\S+)")


class Unreadable(pickle.UnpicklingError):
    """Describes the unexpected content of a checkpoint's file. Has one argument, so that it can be pickled between processes."""


class _Restricted(pickle.Unpickler):
    """Unpickles instances of `METADATA` only."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in METADATA.get(module, ()):
            raise Unreadable(f"a pickle that names {module}.{name}"[:200])
        return super().find_class(module, name)


def install() -> None:
    """Replace the library calls that unpickle parts of a checkpoint.

    Raises:
        ConfigError: this version of torch or Megatron reads differently.
    """
    common = module("dist_checkpointing.strategies.common").TorchCommonLoadStrategy
    for owner, name, value in (
        (FileSystemReader, "read_metadata", _read_metadata),
        (DefaultLoadPlanner, "load_bytes", _load_bytes),
        (common, "load_common", _load_common),
    ):
        if name not in vars(owner):
            raise gone(f"{owner.__name__}.{name}", everywhere=True)
        setattr(owner, name, value)


def metadata(file: Path) -> Metadata:
    """Read the `.metadata` of a checkpoint.

    Raises:
        Unreadable: it is not a pickle of just a `Metadata`, or it names a file outside the checkpoint.
        OSError: it cannot be opened.
    """
    with _opened(file) as opened:
        found = _parsed(file.name, lambda: _Restricted(opened).load())
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict) or not isinstance(found.state_dict_metadata, dict):
        raise Unreadable(f"{file.name}, which is no list of tensors")
    for place in found.storage_data.values():
        path = getattr(place, "relative_path", None)
        if not isinstance(path, str) or path in ("", ".", "..") or PurePosixPath(path).name != path:
            raise Unreadable(f"{file.name}, which names the file {path!r}"[:200])
    return found


def weights(file: BinaryIO, what: str) -> Any:
    """Load a file that `torch.save` wrote, on the CPU, with tensors and plain values only.

    Raises:
        Unreadable: it is damaged, or holds anything else.
    """
    return _parsed(what, lambda: torch.load(file, map_location="cpu", weights_only=True))


def _parsed(what: str, load: Callable[[], Any]) -> Any:
    """Return the result of `load`. Untrusted bytes may make a parser raise anything, so its exceptions become `Unreadable`."""
    try:
        return load()
    except (OSError, MemoryError, Unreadable):
        raise
    except Exception as error:
        named = _NAMED.search(str(error))
        raise Unreadable(f"a pickle that names {named[1]}" if named else f"{what}, which cannot be read") from error


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except FileNotFoundError:
        raise Unreadable(f"no {file.name}") from None


def _read_metadata(self: Any, *_: object, **named: Any) -> Metadata:
    found = metadata(Path(self._get_metadata_path(named.get("rank"))))
    if not isinstance(found.storage_meta, StorageMeta):
        found.storage_meta = StorageMeta()
    found.storage_meta.load_id = self.load_id
    return found


def _load_bytes(self: Any, item: Any, value: io.BytesIO) -> None:
    """Load an object saved among the tensors and store it where `DefaultLoadPlanner.load_bytes` does."""
    name = item.dest_index.fqn
    loaded = weights(value, name)
    if _EXTRA_STATE in name and not all(map(_empty, loaded if isinstance(loaded, list) else [loaded])):
        raise Unreadable(f"a value of {name}, which Transformer Engine would unpickle")
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def _empty(value: object) -> bool:
    """Return whether a layer's extra state is empty, as it is without float8 training."""
    if isinstance(value, io.BytesIO):
        return not value.getbuffer().nbytes or weights(value, _EXTRA_STATE) is None
    return value is None or (isinstance(value, torch.Tensor) and value.numel() == 0)


def _load_common(_: Any, checkpoint_dir: str | Path) -> Any:
    with _opened(Path(checkpoint_dir) / COMMON) as opened:
        return weights(opened, COMMON)
