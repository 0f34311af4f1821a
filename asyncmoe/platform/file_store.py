"""torch's `FileStore`, kept for as long as the process runs.

Its destructor reopens the file to decrement a counter. If the file is removed at that moment, because the process that made it ends too,
the error in a destructor aborts the process (torch/csrc/distributed/c10d/FileStore.cpp). A store keeps no file open and uses little memory;
the process that makes the file removes it.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist


def open_store(path: str | Path) -> Any:
    """Open a store in a file, creating the file if it is missing. The file is never removed, nor the store destroyed, even at exit."""
    c10d: Any = dist
    store = c10d.FileStore(str(path))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def install() -> None:
    """Use `open_store` for this process's `file://` addresses."""
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    module.FileStore = lambda path, _: open_store(path)
