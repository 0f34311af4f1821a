"""The GPU resources of NCCL communicators: multiprocessors during transfers, and memory for as long as they exist."""

from __future__ import annotations

CTA_BYTES = 16 << 20
"""Bytes of a communicator for each thread block (CTA) it may use. NCCL's memory grows with their number (its developers, NVIDIA/nccl issue
986); its pool for messages between machines took 512 MiB at 32 CTAs (NCCL 2.28.9, NVIDIA/nccl issue 2363). Not measured here."""
_RESIDENT = 128
"""CTAs of all of a rank's communicators together. Their kernels must fit on the device at the same time
(`asyncmoe.reshard.nccl_transport.RoutedTransport`): an H100 has 132 multiprocessors, and each runs at least one CTA of NCCL."""
_LEAST = 4


def max_ctas(configured: int, communicators: int) -> int:
    """Return the CTA limit of each of a device's communicators."""
    return min(configured, max(_LEAST, _RESIDENT // max(1, communicators)))


def nbytes(configured: int, communicators: int, mine: int | None = None) -> int:
    """Return the bytes of a device's communicators.

    Args:
        communicators: number of communicators of the rank that has most.
        mine: number on this device, if fewer.
    """
    return (communicators if mine is None else mine) * max_ctas(configured, communicators) * CTA_BYTES
