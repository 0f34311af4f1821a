"""Facts from the kernel: adapters, limits, memory, the clock."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from asyncmoe.doctor.facts import Clock, Fabric, Port, SystemLimits
from asyncmoe.doctor.probes import shell

_TIMEDATECTL_S = 5.0
_STA_UNSYNC = 0x0040
"""Flag of `status` in struct timex (adjtimex(2))."""


def fabric(system: Path = Path("/sys")) -> Fabric:
    """Return the InfiniBand adapters and their ports."""
    adapters = system / "class/infiniband"
    ports = sorted(adapters.glob("*/ports/*")) if adapters.is_dir() else []
    return Fabric(tuple(_port(port) for port in ports), (system / "module/nvidia_peermem").exists())


def limits(shm: Path = Path("/dev/shm")) -> SystemLimits:
    """Return the limits of this process, which its children inherit."""
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    room = os.statvfs(shm) if shm.is_dir() else None
    return SystemLimits(
        shm_bytes=room and room.f_blocks * room.f_frsize,
        shm_free=room and room.f_bavail * room.f_frsize,
        open_files=files,
        open_files_hard=files_hard,
        memlock=None if memlock == resource.RLIM_INFINITY or os.geteuid() == 0 else memlock,
    )


def memory() -> int:
    """Return the bytes of RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def says(file: Path) -> str:
    """Return the content of a file in /sys; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def clock() -> Clock:
    """Return the clock's state from the kernel, else from systemd."""
    told = _adjtimex()
    if told is not None:
        return told
    output = shell.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], _TIMEDATECTL_S)
    if output.text.strip() in ("yes", "no"):
        return Clock(output.text.strip() == "yes", "timedatectl")
    return Clock(None, output.trouble or "timedatectl says nothing")


def _port(folder: Path) -> Port:
    state = says(folder / "state").split(": ")[-1]  # "4: ACTIVE"
    return Port(folder.parent.parent.name, int(folder.name), state, says(folder / "rate"), says(folder / "link_layer"))


class _Timex(ctypes.Structure):
    """The fields of struct timex up to `status`, and padding for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def _adjtimex() -> Clock | None:
    """Return the kernel's clock state; None if the system call is not allowed, as in some containers."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    timex = _Timex()
    if call is None or call(ctypes.byref(timex)) < 0:
        return None
    synchronised = not timex.status & _STA_UNSYNC
    return Clock(synchronised, "adjtimex", timex.maxerror / 1e6 if synchronised else None)
