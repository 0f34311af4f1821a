"""Memory use of a piece of work, as counted by the kernel."""

from __future__ import annotations

import ctypes
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""Value for `/proc/self/clear_refs` that resets the peak of the resident memory to its current size (proc(5))."""


class Growth:
    """This process's resident memory at creation, as a baseline. Pages of shared memory count in every process that touches them."""

    def __init__(self) -> None:
        self.again()
        self._before = _status("VmRSS")

    def again(self) -> None:
        """Reset the peak; the baseline stays."""
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)

    def now_bytes(self) -> int:
        """The current increase of the resident memory."""
        return max(0, _status("VmRSS") - self._before)

    def peak_bytes(self) -> int:
        """The largest increase of the resident memory since creation, or since `again`."""
        return max(0, _status("VmHWM") - self._before)


def give_back() -> None:
    """Return this process's free memory to the kernel, so that earlier use does not count; works only with glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024
