"""Imports of a process that needs torch, Megatron or SGLang, which are most of its start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage within the block, which only imports.

    The modules of torch and Megatron make a million objects, of which next to none is garbage, and collections that look at all of them
    again and again take a sixth of the time.
    """
    collects = gc.isenabled()  # not within another such block
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
