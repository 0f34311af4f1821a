"""Reads a `common.pt` that Megatron-LM wrote, which is a pickle of a namespace of arguments, without importing or calling what it names.

A pickle names classes and functions to call. Here it gets few real ones, which only make plain values, and records in place of those of
Megatron, torch and NumPy: what a name, its arguments and its state were. Any other name is refused. Tensors are not read: weights are in
other files.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import io
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

from asyncmoe.platform.megatron.reader import Unreadable

MAX_BYTES = 256 << 20
"""Largest pickle that is read: arguments and the scheduler take kilobytes; some users' own state takes more."""
_PICKLE = "/data.pkl"
"""How the name of the pickle ends among the parts of a file that `torch.save` wrote (torch/serialization.py)."""
_PLAIN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    **{
        ("builtins", name): getattr(builtins, name)
        for name in ("set", "frozenset", "complex", "bytearray", "range", "slice", "list", "dict")
    },
}
"""What makes plain values, and has no effect besides."""
_FORMERLY = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names of modules of Python 2, which pickles of before protocol 3 have; `torch.save` writes protocol 2."""
_RECORDED = ("megatron", "torch", "numpy", "transformer_engine", "modelopt", "pathlib", "datetime", "enum")
"""Packages, and modules within, whose names become records."""


class Record:
    """An instance of a class that is not imported. Settings of Megatron that are enumerations are such records.

    Attributes:
        of: full name of the class or function.
        arguments: that it was called with.
        state: that it was given.
    """

    of = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named = arguments, named

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take what a pickle puts into a mapping."""

    def append(self, value: Any) -> None:
        """Take what a pickle puts into a list."""

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"{self.of}({', '.join(map(repr, self.arguments))})"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = _FORMERLY.get(module, module)
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if any(module == package or module.startswith(f"{package}.") for package in _RECORDED):
            return type(name, (Record,), {"of": f"{module}.{name}"})
        raise Unreadable(f"a pickle that names {module}.{name}"[:200])

    def persistent_load(self, pid: Any) -> Record:
        """Stand for a tensor's memory."""
        return Record(pid)


def _member(owner: Any, name: str) -> Record:
    """Stand for `getattr`, with which Python pickles some members of enumerations."""
    if not (isinstance(owner, type) and issubclass(owner, Record)):
        raise Unreadable("a pickle that names builtins.getattr")
    made = Record(name)
    made.of = owner.of
    return made


def _encoded(text: str, encoding: str) -> bytes:
    """Stand for `_codecs.encode`, with which Python pickles bytes."""
    if encoding != "latin1":
        raise Unreadable(f"a pickle that names _codecs.encode for {encoding!r}"[:200])
    return text.encode(encoding)


_STAND_INS: dict[tuple[str, str], Any] = {("builtins", "getattr"): _member, ("_codecs", "encode"): _encoded}


def common(file: Path) -> dict[str, Any]:
    """Return the contents of a `common.pt`; tensors are records.

    Raises:
        Unreadable: it names something else than plain values and records, is damaged, or is not a mapping.
        OSError: it cannot be opened.
    """
    if not file.is_file():
        raise Unreadable(f"no {file.name}")
    try:
        with zipfile.ZipFile(file) as parts:
            (part,) = [one for one in parts.infolist() if one.filename.endswith(_PICKLE)]
            if part.file_size > MAX_BYTES:
                raise Unreadable(f"{file.name} of {part.file_size} bytes")
            with parts.open(part) as opened:
                found = _Unpickler(io.BytesIO(opened.read(MAX_BYTES))).load()
    except (OSError, MemoryError, Unreadable):
        raise
    except Exception as error:  # bytes from a stranger may make a parser raise anything
        raise Unreadable(f"{file.name}, which cannot be read") from error
    if not isinstance(found, dict):
        raise Unreadable(f"{file.name}, which is no mapping")
    return found
