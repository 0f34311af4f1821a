"""CPU threads of an optimizer step, which has much to compute on the CPU if the optimizer's state is in host memory.

A rank has one thread (`asyncmoe.launch.torchrun`), because ranks whose threads outnumber the cores would slow each other down. In the step
all ranks of a machine update their offloaded parameters at the same time, on the calling thread and OpenMP's (`HybridDeviceOptimizer.step`
of megatron-core's optimizer/cpu_offloading, then torch's fused AdamW: 1.1 ns per parameter on one thread, 0.64 on two, measured).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from asyncmoe.rpc.environment import OWN_THREADS

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@contextmanager
def for_step(offloaded: bool) -> Iterator[None]:
    """Give torch this rank's share of the machine's cores as threads within the context, if state is `offloaded` and the user has not set
    OMP_NUM_THREADS."""
    if not (offloaded and OWN_THREADS in os.environ):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Return the cores that this process may use: those of its affinity, or fewer by its container's quota (cgroup v2)."""
    found = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such file; "max" is no quota
        quota, period = map(int, _QUOTA.read_text().split())
        found = min(found, quota // period)
    return found
