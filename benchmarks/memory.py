"""How much memory a piece of work takes, as the kernel counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""What `/proc/self/clear_refs` takes to set the peak of the resident memory back to what is resident now (proc(5))."""


class Growth:
    """What this process has resident now, to compare with. Pages of shared memory count in every process that touches them."""

    def __init__(self) -> None:
        self.again()
        self._before = _status("VmRSS")

    def again(self) -> None:
        """Forget how high it has been; what it is compared with stays."""
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)

    def now_bytes(self) -> int:
        """By how much more is resident now."""
        return max(0, _status("VmRSS") - self._before)

    def peak_bytes(self) -> int:
        """By how much the resident memory rose, at its highest since this was made, or since `again`."""
        return max(0, _status("VmHWM") - self._before)


def give_back() -> None:
    """Return memory that is free in this process to the kernel, so that what used it before does not count; only glibc can."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024
