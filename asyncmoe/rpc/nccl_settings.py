"""NCCL settings, which must be the same in all processes among which NCCL carries weights.

Each process decides by itself, from its environment, by which kind of handle NCCL shares memory with peers, over which transport, and in
which pieces (2.30: src/transport/p2p.cc, shm.cc, net.cc). If processes decide differently, the first message fails with "invalid argument",
or never arrives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_CUMEM = "NCCL_CUMEM_ENABLE"
"""SGLang sets this to 0 in its processes unless given (0.5.23, `_set_envs_and_config` of entrypoints/engine.py); NCCL's own default is
1 almost everywhere. SGLang sets NCCL_NVLS_ENABLE too, but there NCCL takes the minimum over all ranks (src/init.cc)."""
_OWN = """
NCCL_CONF_FILE NCCL_DEBUG NCCL_DMABUF_ENABLE NCCL_GRAPH_DUMP_ NCCL_GRAPH_FILE NCCL_HOSTID NCCL_IB_ADDR_ NCCL_IB_GID_INDEX NCCL_IB_HCA
NCCL_IB_PCI_ NCCL_IB_PKEY NCCL_IB_RETRY_CNT NCCL_IB_ROCE_ NCCL_IB_SL NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY NCCL_NET_GDR_
NCCL_NVLS_ENABLE NCCL_NVTX_ NCCL_OOB_NET_IFNAME NCCL_PROFILER_ NCCL_PROXY_CPUSET NCCL_RAS_ NCCL_SOCKET_IFNAME NCCL_TOPO_
"""
"""Name prefixes of settings that may differ: they describe a machine, or what is logged."""


def set_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings to add to a process's environment, so that the trainer's ranks and SGLang's processes have the same ones."""
    return {_CUMEM: _all(environ).get(_CUMEM, "0")}


def shared(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings that must be the same in all processes, as a trainer rank or an engine started in this environment has them."""
    found = _all(environ) | set_defaults(environ)
    return {name: value for name, value in found.items() if name.startswith("NCCL_") and not name.startswith(tuple(_OWN.split()))}


def _all(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that NCCL reads (src/misc/param.cc): from the environment, then the user's file, then the machine's."""
    user = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    found = dict(environ)
    for file in (user, "/etc/nccl.conf"):
        with suppress(OSError):
            lines = Path(file).read_text(errors="replace").splitlines()
            found = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#") | found
    return found
