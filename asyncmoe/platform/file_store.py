"""torch's `FileStore`, kept for as long as the process runs.

Its destructor opens the file again, to count itself out. If the file goes in that moment, because the process that made it ends too, the
error cannot leave a destructor and aborts the process (torch/csrc/distributed/c10d/FileStore.cpp). A store has no open file and little
memory, and whoever makes the file removes it.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist


def open_store(path: str | Path) -> Any:
    """Open a store in a file, which is made unless it exists and never removed; the store is not destroyed, even at exit."""
    c10d: Any = dist
    store = c10d.FileStore(str(path))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def install() -> None:
    """Open the stores of this process's `file://` addresses in the same way."""
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    module.FileStore = lambda path, _: open_store(path)
