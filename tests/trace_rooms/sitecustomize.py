"""Python imports this module when it starts, if its folder is in PYTHONPATH: writes which rooms of asyncmoe a weight version passes.

What runs below a function of `asyncmoe/weights/`, or below the trainer's call of the publisher, belongs to the way of a version, in every
process of a run; what imports run does not. `ASYNCMOE_ROOMS` names the folder that gets one file a process: a line for each new (module,
called function).
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2] / "asyncmoe") + os.sep
_OUT = os.environ.get("ASYNCMOE_ROOMS")
_BEGINS = ("trainer/loop.py", "_begin_sync")
_below = threading.local()
_seen: set[tuple[str, str]] = set()


def _profile(frame: FrameType, event: str, _: Any) -> None:
    if event not in ("call", "return"):
        return
    depth: int = getattr(_below, "depth", 0)
    function, imports = frame.f_code.co_name, getattr(_below, "imports", 0)
    if depth and function == "<module>":
        _below.imports = imports + (1 if event == "call" else -1)
    if event == "return":
        _below.depth = max(depth - 1, 0)
        return
    place = frame.f_code.co_filename
    name = place.removeprefix(_ROOT)
    begins = function != "<module>" and ((name, function) == _BEGINS or (name != place and name.startswith("weights/")))
    if depth or begins:
        _below.depth = depth + 1
        if name != place and not imports and function != "<module>":
            _note(name, function)


def _note(name: str, function: str) -> None:
    found = (name, function)
    if found not in _seen:
        _seen.add(found)
        with open(f"{_OUT}/{os.getpid()}", "a") as file:
            file.write(f"{name} {function}\n")


if _OUT:
    threading.setprofile(_profile)
    sys.setprofile(_profile)
