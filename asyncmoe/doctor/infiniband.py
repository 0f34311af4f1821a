"""The check of InfiniBand and RoCE adapters: whether their ports are up, and whether NCCL can use them."""

from __future__ import annotations

import os
import resource

from asyncmoe.doctor import finding
from asyncmoe.doctor.finding import Finding
from asyncmoe.rpc.nics import Nics
from asyncmoe.storage import size

_INSTALL = "apt-get install libibverbs1 ibverbs-providers (elsewhere rdma-core), and start a container with --device /dev/infiniband"


def infiniband(nics: Nics) -> Finding:
    """Check that ports are up, that NCCL finds their adapters, and that memory can be locked, as registering memory with NCCL requires."""
    if not nics.ports:
        return finding.absent("no adapter; several machines would talk over TCP")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
        hint = "ulimit -l unlimited; as root: memlock unlimited in /etc/security/limits.conf, LimitMEMLOCK=infinity of slurmd"
        return finding.error(f"NCCL cannot register memory with the adapter: at most {size(limit)} can be locked", hint)
    told = ", ".join(f"{port} is {state}" for port, state in nics.ports.items())
    if lost := sorted(set(nics.up) - set(nics.usable)):
        got = nics.trouble or f"libibverbs lists {', '.join(nics.listed) or 'no adapter'}"
        what = f"{told}; got {got}, so NCCL would use TCP instead of {', '.join(lost)}"
        return Finding("warning", what, _INSTALL, "a libibverbs that lists every adapter whose port is ACTIVE")
    if len(nics.up) < len(nics.ports):
        return finding.warning(told, "look at ibstat and the cables, or list in NCCL_IB_HCA the ports that are ACTIVE")
    return finding.ok(told)
