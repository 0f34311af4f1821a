"""How the output layer's vocabulary is cut into blocks, so that only one block of logits exists at a time."""

from __future__ import annotations

CPU_ENTRIES, ENTRIES = 1 << 22, 1 << 26
"""Logits of a block: 16 MiB of float32 on a CPU, which stay in its last cache from one operation to the next, and 128 MiB of bfloat16 on a
GPU, whose kernels want much to do at once."""
_LEAST = 128
"""Ids of the narrowest block; narrower ones would make matrix products slow."""


def width(rows: int, vocabulary: int, cpu: bool) -> int:
    """Return the ids of a block; the last one may have fewer.

    Args:
        rows: rows whose logits are computed.
        vocabulary: ids of the rank.
    """
    return min(vocabulary, max(_LEAST, (CPU_ENTRIES if cpu else ENTRIES) // max(rows, 1)))
