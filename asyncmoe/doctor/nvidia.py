"""GPUs, as nvidia-smi reports them, and how many are on the PCI bus, which can be read without a driver."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from asyncmoe.doctor import programs
from asyncmoe.doctor.facts import GpuFacts, Nvidia

_SMI_S = 30.0
"""Timeout in seconds; without persistence mode, nvidia-smi initializes every GPU, which takes some seconds each."""
_FIELDS = ("index", "name", "memory.total", "memory.used", "compute_mode", "compute_cap", "mig.mode.current", "driver_version", "uuid")
_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


def look(devices: Path = Path("/sys/bus/pci/devices")) -> Nvidia:
    """Return all facts about GPUs, within `_SMI_S`."""
    on_bus = _on_bus(devices)
    listed = programs.run(["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"], _SMI_S)
    if listed.trouble is not None:
        return Nvidia(on_bus, trouble=f"{listed.trouble}: {programs.last_line(listed.errors or listed.text)}".removesuffix(": "))
    return replace(read_gpus(listed.text, on_bus), chosen=_chosen())


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


def _chosen() -> tuple[str, ...] | None:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else tuple(filter(None, (entry.strip() for entry in given.split(","))))


def _mib(text: str) -> int:
    """Parse MiB; 0 for [N/A], which nvidia-smi prints for a MIG instance or a GPU that shares the host's memory."""
    return int(text) if text.isdigit() else 0


def _on_bus(devices: Path) -> int:
    """Return the number of NVIDIA display and 3D controllers."""
    return sum(says(device / "vendor") == _VENDOR and says(device / "class").startswith(_DISPLAY_CLASS) for device in devices.glob("*"))


def says(file: Path) -> str:
    """Return the content of a file in /sys; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
