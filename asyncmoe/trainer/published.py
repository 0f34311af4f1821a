"""What both ways of publishing weights say of it."""

from __future__ import annotations

from dataclasses import dataclass

Checksums = tuple[dict[str, str], ...]
"""For each rank of an engine {SGLang parameter: checksum}."""


@dataclass(frozen=True)
class Published:
    """What publishing a version cost."""

    version: int
    seconds: float
    pause_ms: float
    """The longest any engine stood still; 0 on ranks other than 0."""
