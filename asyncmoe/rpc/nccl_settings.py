"""NCCL's settings, which must be the same in all processes between which NCCL carries weights.

NCCL decides in each process by itself, from its environment, whether peers hand over memory by one kind of handle or another, over which
transport, and in which pieces (2.30: src/transport/p2p.cc, shm.cc, net.cc). If they decide differently, the first message fails with
"invalid argument", or never comes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_CUMEM = "NCCL_CUMEM_ENABLE"
"""SGLang sets 0 in its processes unless it is given (0.5.23, `_set_envs_and_config` of entrypoints/engine.py); NCCL's own default is 1
almost everywhere. Of NCCL_NVLS_ENABLE, which it sets too, NCCL takes the least of all ranks (src/init.cc)."""
_OWN = """
NCCL_CONF_FILE NCCL_DEBUG NCCL_DMABUF_ENABLE NCCL_GRAPH_DUMP_ NCCL_GRAPH_FILE NCCL_HOSTID NCCL_IB_ADDR_ NCCL_IB_GID_INDEX NCCL_IB_HCA
NCCL_IB_PCI_ NCCL_IB_PKEY NCCL_IB_RETRY_CNT NCCL_IB_ROCE_ NCCL_IB_SL NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY NCCL_NET_GDR_
NCCL_NVLS_ENABLE NCCL_NVTX_ NCCL_OOB_NET_IFNAME NCCL_PROFILER_ NCCL_PROXY_CPUSET NCCL_RAS_ NCCL_SOCKET_IFNAME NCCL_TOPO_
"""
"""Beginnings of the names of settings that may differ: they describe a machine, or what is logged."""


def set_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings to add to a process's environment, so that a trainer's ranks and SGLang's processes have the same."""
    return {_CUMEM: _all(environ).get(_CUMEM, "0")}


def shared(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings that all processes must have alike, as a trainer rank or an engine has them that starts in an environment."""
    found = _all(environ) | set_defaults(environ)
    return {name: value for name, value in found.items() if name.startswith("NCCL_") and not name.startswith(tuple(_OWN.split()))}


def _all(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what NCCL reads (src/misc/param.cc): the environment, then one of the user's files, then the machine's."""
    user = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    found = dict(environ)
    for file in (user, "/etc/nccl.conf"):
        with suppress(OSError):
            lines = Path(file).read_text(errors="replace").splitlines()
            found = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#") | found
    return found
