"""GPUs, as nvidia-smi reports them, and their number on the PCI bus, which needs no driver."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from asyncmoe.doctor.facts import GpuFacts, Nvidia
from asyncmoe.doctor.probes import timeouts
from asyncmoe.doctor.probes.machine import says

_SMI_S = 30.0
"""Timeout in seconds; without persistence mode, nvidia-smi initializes every GPU, which takes some seconds each."""
_FIELDS = ("index", "name", "memory.total", "memory.used", "compute_mode", "compute_cap", "mig.mode.current", "driver_version", "uuid")
_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


def look(devices: Path = Path("/sys/bus/pci/devices")) -> Nvidia:
    """Return all facts about GPUs, within twice `_SMI_S`."""
    on_bus = _on_bus(devices)
    listed = timeouts.run(["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"], _SMI_S)
    if listed.trouble is not None:
        said = timeouts.last_line(listed.errors or listed.text)
        return Nvidia(on_bus, trouble=f"{listed.trouble}: {said}" if said else listed.trouble)
    found = replace(read_gpus(listed.text, on_bus), chosen=_chosen())
    if len(found.gpus) < 2:
        return found
    return replace(found, links=read_links(timeouts.run(["nvidia-smi", "topo", "-m"], _SMI_S).text, len(found.gpus)))


def read_gpus(text: str, on_bus: int) -> Nvidia:
    """Parse the output of `nvidia-smi --query-gpu`; a malformed line (an error in words) becomes the trouble."""
    gpus, driver = [], None
    for line in filter(None, map(str.strip, text.splitlines())):
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_FIELDS) or not values[0].isdigit():
            return Nvidia(on_bus, trouble=f"nvidia-smi says: {line[:200]}")
        index, name, total, used, mode, capability, mig, driver, uuid = values
        gpus.append(GpuFacts(int(index), name, _mib(total), _mib(used), mode, capability, mig == "Enabled", uuid))
    return Nvidia(on_bus, driver, tuple(gpus), trouble=None if gpus else "nvidia-smi lists no GPU")


def read_links(text: str, count: int) -> tuple[tuple[str, ...], ...]:
    """Parse the matrix of GPU links from `nvidia-smi topo -m`; empty if it is incomplete."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split()[1 : 1 + count] for line in plain.splitlines() if re.match(r"GPU\d+\s+\S*(X|NV|PIX|PXB|PHB|NODE|SYS)", line)]
    return tuple(map(tuple, rows)) if len(rows) == count and all(len(row) == count for row in rows) else ()


def _chosen() -> tuple[str, ...] | None:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else tuple(filter(None, (entry.strip() for entry in given.split(","))))


def _mib(text: str) -> int:
    """Parse MiB; 0 for [N/A], which nvidia-smi prints for a MIG instance or a GPU that shares the host's memory."""
    return int(text) if text.isdigit() else 0


def _on_bus(devices: Path) -> int:
    """Return the number of NVIDIA display and 3D controllers."""
    if not devices.is_dir():
        return 0
    return sum(says(device / "vendor") == _VENDOR and says(device / "class").startswith(_DISPLAY_CLASS) for device in devices.iterdir())
