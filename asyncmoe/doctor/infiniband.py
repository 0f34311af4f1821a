"""InfiniBand and RoCE adapters: whether their ports are up, and whether NCCL can use them."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from asyncmoe.doctor import finding
from asyncmoe.doctor.facts import Adapters
from asyncmoe.doctor.finding import Finding
from asyncmoe.doctor.nvidia import says
from asyncmoe.storage import size

_INSTALL = "apt-get install libibverbs1 ibverbs-providers (elsewhere rdma-core), and start a container with --device /dev/infiniband"


def look(folder: Path = Path("/sys/class/infiniband")) -> Adapters:
    """Return the facts about this machine's adapters; libibverbs is opened only if there are any."""
    ports = {f"{port.parents[1].name}:{port.name}": says(port / "state").split(": ")[-1] for port in sorted(folder.glob("*/ports/*"))}
    try:
        return Adapters(ports, _listed() if ports else ())
    except OSError as error:
        return Adapters(ports, trouble=str(error))


def _listed() -> tuple[str, ...]:
    """Return the names of the adapters for which libibverbs has a driver and a device, as NCCL asks for them (2.30: src/misc/ibvsymbols.cc,
    src/transport/net_ib/init.cc). Raises OSError if the library cannot be opened."""
    library, count = ctypes.CDLL(os.environ.get("NCCL_IBVERBS_LIB", "libibverbs.so.1")), ctypes.c_int()
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype = ctypes.c_char_p
    devices = library.ibv_get_device_list(ctypes.byref(count))
    return tuple(library.ibv_get_device_name(ctypes.c_void_p(devices[index])).decode() for index in range(count.value))


def infiniband(adapters: Adapters) -> Finding:
    """Check that ports are up, that NCCL finds their adapters, and that memory can be locked, as registering memory with NCCL requires."""
    if not adapters.ports:
        return finding.absent("no adapter; several machines would talk over TCP")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
        hint = "ulimit -l unlimited; as root: memlock unlimited in /etc/security/limits.conf, LimitMEMLOCK=infinity of slurmd"
        return finding.error(f"NCCL cannot register memory with the adapter: at most {size(limit)} can be locked", hint)
    told = ", ".join(f"{port} is {state}" for port, state in adapters.ports.items())
    if lost := sorted(set(adapters.up) - set(adapters.usable)):
        got = adapters.trouble or f"libibverbs lists {', '.join(adapters.listed) or 'no adapter'}"
        what = f"{told}; got {got}, so NCCL would use TCP instead of {', '.join(lost)}"
        return Finding("warning", what, _INSTALL, "a libibverbs that lists every adapter whose port is ACTIVE")
    if len(adapters.up) < len(adapters.ports):
        return finding.warning(told, "look at ibstat and the cables, or list in NCCL_IB_HCA the ports that are ACTIVE")
    return finding.ok(told)
