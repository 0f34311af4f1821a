"""Whether a run's logs leave enough room for what must be written: the run's own limit, and the disk or server that holds them."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE, _FREE, _FREE_BYTES = 3 / 4, 1 / 20, 16 << 30
"""A recorded window fills at most this share of `log.max_bytes`, and leaves this share of the disk free, or this many bytes if they are
less. The rest is for what arrives until records are deleted; only whole segments are, of up to an eighth of `log.max_bytes`."""


@dataclass(frozen=True)
class Room:
    """Sizes in bytes.

    Attributes:
        largest: of the largest log of payloads.
        free: left on the disk that holds the logs, or in the server's memory.
        total: of that disk or memory; 0: unknown.
    """

    largest: int
    free: int
    total: int

    def lacking(self, max_bytes: int, reserve: int) -> str:
        """Return why less must be recorded; "" if there is room enough.

        Args:
            max_bytes: `log.max_bytes`.
            reserve: bytes that something else will need there.
        """
        if self.largest > _SHARE * max_bytes:
            return "the log nears log.max_bytes"
        if self.total and self.free < min(self.total * _FREE, _FREE_BYTES) + reserve:
            return "the disk or server of the log is nearly full"
        return ""
