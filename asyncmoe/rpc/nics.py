"""InfiniBand and RoCE adapters of this machine, and the network by which NCCL connects machines."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncmoe.rpc import nccl_settings


@dataclass(frozen=True)
class Nics:
    """InfiniBand and RoCE adapters of a machine.

    Attributes:
        ports: state by port, e.g. {"mlx5_0:1": "ACTIVE"}.
        listed: the adapters that libibverbs finds; only these exist for NCCL.
        trouble: why libibverbs cannot be opened.
    """

    ports: Mapping[str, str] = field(default_factory=dict)
    listed: tuple[str, ...] = ()
    trouble: str | None = None

    @property
    def up(self) -> tuple[str, ...]:
        """The active ports."""
        return tuple(port for port, state in self.ports.items() if state == "ACTIVE")

    @property
    def usable(self) -> tuple[str, ...]:
        """The ports that NCCL can use."""
        return tuple(port for port in self.up if port.rpartition(":")[0] in self.listed)


def look(folder: Path = Path("/sys/class/infiniband")) -> Nics:
    """Return the facts about this machine's adapters; libibverbs is opened only if there are any."""
    states = {f"{state.parents[2].name}:{state.parent.name}": state for state in sorted(folder.glob("*/ports/*/state"))}
    ports = {port: state.read_text().strip().split(": ")[-1] for port, state in states.items()}
    try:
        return Nics(ports, _listed() if ports else ())
    except OSError as error:
        return Nics(ports, trouble=str(error))


def network(settings: Mapping[str, str], nics: Nics) -> str:
    """Return "InfiniBand" or "TCP": how NCCL connects this machine to others; "": the user's plug-in decides.

    Args:
        settings: `nccl_settings.shared`.
    """
    if settings.keys() & {"NCCL_NET", "NCCL_NET_PLUGIN"}:
        return ""
    return "InfiniBand" if nics.usable and settings.get("NCCL_IB_DISABLE", "0") == "0" else "TCP"


def here() -> str:
    """Return `network` of this machine."""
    return network(nccl_settings.shared(), look())


def _listed() -> tuple[str, ...]:
    """Return the names of the adapters for which libibverbs has a driver and a device, as NCCL asks for them (2.30: src/misc/ibvsymbols.cc,
    src/transport/net_ib/init.cc). Raises OSError if the library cannot be opened."""
    library, count = ctypes.CDLL(os.environ.get("NCCL_IBVERBS_LIB", "libibverbs.so.1")), ctypes.c_int()
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype = ctypes.c_char_p
    devices = library.ibv_get_device_list(ctypes.byref(count))
    return tuple(library.ibv_get_device_name(ctypes.c_void_p(devices[index])).decode() for index in range(count.value))
