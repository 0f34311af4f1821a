"""NVIDIA's NCCL, found by this process at run time without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import asyncmoe.reshard._C as _C
from asyncmoe.errors import UserError

T = TypeVar("T")

SONAME = "libnccl.so.2"
CTA_BYTES = 16 << 20
"""Device memory of a communicator for each thread block (CTA) that it may use. NCCL's memory grows with their number (say its developers,
NVIDIA/nccl issue 986); its pool for messages between machines took 512 MiB at 32 CTAs (NCCL 2.28.9, NVIDIA/nccl issue 2363). Not measured
here."""


@dataclass(frozen=True)
class Origin:
    """The NCCL that this process uses.

    Attributes:
        version: NCCL_VERSION_CODE, such as 22803 for 2.28.3.
        path: the file it was loaded from.
    """

    version: int
    path: str

    @property
    def words(self) -> str:
        """The version as "2.28.3"."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"


def origin(library: str | None = None) -> Origin:
    """Return the NCCL that this process's communicators use.

    Raises:
        UserError: no usable NCCL was found.
    """
    return Origin(*_opened(library, _C.nccl_origin))


def find_nccl() -> str:
    """Return the path of the NCCL installed by pip, else the library's name, by which the loader finds torch's or the system's."""
    package = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = list(package.submodule_search_locations or []) if package else []
    found = [str(path) for folder in folders if (path := Path(folder, "lib", SONAME)).exists()]
    return found[0] if found else SONAME


def make_unique_id(library: str | None = None) -> bytes:
    """Return a new NCCL unique ID (128 bytes), which one rank creates and passes to all ranks of a communicator.

    Raises:
        UserError: no usable NCCL was found.
    """
    return _opened(library, _C.nccl_unique_id)


def _opened(library: str | None, call: Callable[[str], T]) -> T:
    path = library or find_nccl()
    try:
        return call(path)
    except RuntimeError as error:
        hint = "install nvidia-nccl-cu13 (or -cu12), or put the library's directory on LD_LIBRARY_PATH"
        raise UserError(f"NCCL ({path})", got=str(error), expected="NVIDIA's NCCL 2.14 or later", hint=hint) from error
