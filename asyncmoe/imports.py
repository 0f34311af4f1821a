"""Faster imports of torch, Megatron and SGLang, which dominate a process's start-up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection within the block, which only imports, or makes no garbage that needs it.

    Importing torch and Megatron makes a million objects, hardly any of them garbage; repeated collections would take a sixth of the time.
    """
    collects = gc.isenabled()  # False within another such block
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
