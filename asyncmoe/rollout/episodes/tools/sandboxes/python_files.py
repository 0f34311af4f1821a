"""The files that Python needs to run programs of the standard library, and no others.

A Python is asked once: it loads every extension module of its standard library and lists the shared libraries that the dynamic linker has
opened, under the names by which it opened them (dl_iterate_phdr(3)). A root with these files at these names needs no symbolic link.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from asyncmoe.errors import ConfigError

_LISTING_S = 60.0
_SYSTEM = ("/etc/ld.so.cache", "/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8", "/usr/share/zoneinfo")
"""Public files of the system that the standard library reads where they exist: of the linker, the locale C.UTF-8, and time zones."""
_PACKAGES = ("site-packages", "dist-packages")

_LISTING = """
import ctypes, json, os, sys
libc, opened = ctypes.CDLL(None), []
class Object(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Object), ctypes.c_size_t, ctypes.c_void_p)
def note(entry, size, data):
    opened.append(os.fsdecode(entry.contents.name or b""))
    return 0
paths = [path for path in sys.path if os.path.exists(path)]
files = [(path, name) for path in paths if os.path.isdir(path) for name in os.listdir(path) if name.endswith(".so")]
modules = [os.path.join(path, name) for path, name in files if not name.startswith(("_tkinter", "_test"))]  # there is no display
for name in [*modules, "libgcc_s.so.1"]:  # libc loads the last by itself when a thread ends
    try:
        ctypes.CDLL(name)
    except OSError:
        pass  # a module without its library does not work outside either
libc.dl_iterate_phdr(note, None)
print(json.dumps([paths, opened]))
"""


@dataclass(frozen=True)
class PythonFiles:
    """What a root must hold for a Python.

    Attributes:
        python: its executable, without symbolic links.
        bound: {path inside: path outside} of files and directories, parents before children.
        hidden: directories inside those of `bound` that hold installed packages; to be covered.
    """

    python: str
    bound: Mapping[str, str]
    hidden: tuple[str, ...]


@functools.cache
def python_files(python: str | None = None) -> PythonFiles:
    """Return the files that a Python needs; None: the one on which this process's environment is built.

    Raises:
        ConfigError: that Python does not run, or has no ctypes.
    """
    # In an environment made with copies, sys.executable is not the Python that has the standard library beside it.
    base: str = getattr(sys, "_base_executable", sys.executable)
    python = os.path.realpath(python or base)
    command = [python, "-I", "-S", "-c", _LISTING]
    try:
        done = subprocess.run(command, env={}, capture_output=True, timeout=_LISTING_S, check=True)
        paths, opened = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError("tools python", got=f"{python}: {_why(error)}", expected="a Python with its standard library") from error
    directories = _outermost([os.path.normpath(path) for path in paths])
    libraries = [os.path.normpath(name) for name in opened if name.startswith("/")]
    files = [path for path in (python, *libraries, *_SYSTEM) if os.path.exists(path) and not _inside(path, directories)]
    hidden = [os.path.join(path, name) for path in directories for name in _PACKAGES]
    return PythonFiles(
        python=python,
        bound={path: os.path.realpath(path) for path in sorted({*directories, *files})},
        hidden=tuple(path for path in hidden if os.path.isdir(path)),
    )


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return next(reversed(error.stderr.decode(errors="replace").strip().splitlines()), f"status {error.returncode}")
    return f"nothing within {_LISTING_S:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)


def _inside(path: str, directories: list[str]) -> bool:
    return any(PurePath(directory) in PurePath(path).parents for directory in directories)


def _outermost(paths: list[str]) -> list[str]:
    return sorted(path for path in set(paths) if not _inside(path, paths))
