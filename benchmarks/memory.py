"""How much memory a piece of work takes, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""What `/proc/self/clear_refs` takes to set the peak of the resident memory back to what is resident now (proc(5))."""


class Growth:
    """What this process has resident now, to compare with. Pages of shared memory count in every process that touches them."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self._before = _status("VmRSS")

    def peak_bytes(self) -> int:
        """By how much the resident memory rose, at its highest since this was made."""
        return max(0, _status("VmHWM") - self._before)


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024
