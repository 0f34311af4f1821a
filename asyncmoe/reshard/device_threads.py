"""Threads that touch a device: every one of them starts here.

CUDA keeps the current device for each thread of the host, and a new thread has device 0 whatever the others have (CUDA runtime API,
cudaSetDevice). There an array library refuses arrays of another device, and what is allocated or synchronised costs a context on GPU 0.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError


def make_current(device: str) -> None:
    """Make a device the calling thread's, for this package's extension and, where it is loaded, for torch.

    Args:
        device: "cpu", which changes nothing, or "cuda:1".

    Raises:
        LayoutError: no such name.
        RuntimeError: CUDA's words.
    """
    if device == "cpu":
        return
    number = re.fullmatch(r"cuda:(\d+)", device)
    if number is None:
        raise LayoutError("device of a thread", got=device, expected="cpu, or cuda: with a number")
    # Each has a CUDA runtime of its own, and torch remembers the device besides.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(int(number[1]))
    if _C.CUDA:
        _C.swap_device(int(number[1]))


def start(device: str, name: str, run: Callable[[], None], failed: Callable[[Exception], None]) -> threading.Thread:
    """Start a daemon thread.

    Args:
        device: see `make_current`; it is the thread's before `run` begins.
        failed: called in the thread with whatever ends `run`, and whatever keeps it from beginning: nobody else would hear of it.
    """

    def edge() -> None:
        try:
            make_current(device)
            run()
        except Exception as error:  # noqa: BLE001  the thread ends here, and this is who hears of it
            failed(error)

    thread = threading.Thread(target=edge, name=name, daemon=True)
    thread.start()
    return thread


def pool(device: str, workers: int, name: str) -> ThreadPoolExecutor:
    """Threads of which each has the device before its first task; see `make_current`."""
    return ThreadPoolExecutor(workers, name, initializer=make_current, initargs=(device,))
