"""What NCCL communicators take of a GPU: multiprocessors while messages travel, and memory for as long as they are there."""

from __future__ import annotations

CTA_BYTES = 16 << 20
"""Of a communicator, for each block of threads (CTA) it may use. NCCL's memory grows with them (its developers, NVIDIA/nccl issue 986), and
its pool for messages between machines was seen to take 512 MiB at 32 of them (NCCL 2.28.9, NVIDIA/nccl issue 2363). Not measured here."""
_RESIDENT = 128
"""Kernels of all of a rank's communicators have to fit onto its device together (`asyncmoe.reshard.nccl_transport.RoutedTransport`): an
H100 has 132 multiprocessors, and each runs one block of NCCL's at least."""
_LEAST = 4


def max_ctas(configured: int, communicators: int) -> int:
    """Of each communicator, where a device has so many."""
    return min(configured, max(_LEAST, _RESIDENT // max(1, communicators)))


def nbytes(configured: int, communicators: int, mine: int | None = None) -> int:
    """Memory of a device's communicators.

    Args:
        communicators: of the rank that has most.
        mine: of this one, if fewer.
    """
    return (communicators if mine is None else mine) * max_ctas(configured, communicators) * CTA_BYTES
