"""Start threads that use a device, with that device as their current one; all such threads start here.

CUDA's current device is a property of a host thread, and a new thread starts on device 0 (CUDA runtime API, cudaSetDevice). On the wrong
device an array library refuses arrays, and any allocation or synchronisation creates a context on GPU 0.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import asyncmoe.reshard._C as _C


def make_current(device: str) -> None:
    """Make a device the calling thread's current one, for this package's extension and, if it is loaded, for torch.

    Args:
        device: "cpu", which changes nothing, or "cuda:1".

    Raises:
        RuntimeError: CUDA failed; carries its message.
    """
    if device == "cpu":
        return
    index = int(device.removeprefix("cuda:"))
    # torch and the extension each have their own CUDA runtime, and torch also caches the current device.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(index)
    if _C.CUDA:
        _C.swap_device(index)


def start(device: str, name: str, run: Callable[[], None], failed: Callable[[Exception], None]) -> threading.Thread:
    """Start a daemon thread.

    Args:
        device: see `make_current`, which is called before `run`.
        failed: called in the thread with any exception of `make_current` or `run`, which would otherwise be lost.
    """

    def edge() -> None:
        try:
            make_current(device)
            run()
        except BaseException as error:  # noqa: BLE001  top of the thread: `failed` reports it
            failed(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=edge, name=name, daemon=True)
    thread.start()
    return thread


def pool(device: str, workers: int, name: str) -> ThreadPoolExecutor:
    """Return a thread pool whose threads call `make_current(device)` before their first task."""
    return ThreadPoolExecutor(workers, name, initializer=make_current, initargs=(device,))
