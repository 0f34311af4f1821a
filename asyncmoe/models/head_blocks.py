"""The size of the blocks that the output layer's vocabulary is cut into, so that only one block of logits exists at a time."""

from __future__ import annotations

CPU_ENTRIES, ENTRIES = 1 << 22, 1 << 26
"""Logits per block: 16 MiB of float32 on a CPU, which stay in its last-level cache between operations, and 128 MiB of bfloat16 on a GPU,
whose kernels need large inputs."""
_LEAST = 128
"""Minimum number of ids in a block; smaller blocks would make matrix products slow."""


def width(rows: int, vocabulary: int, cpu: bool) -> int:
    """Return the number of ids in a block; the last block may have fewer.

    Args:
        rows: rows whose logits are computed.
        vocabulary: number of ids on the rank.
    """
    return min(vocabulary, max(_LEAST, (CPU_ENTRIES if cpu else ENTRIES) // max(rows, 1)))
