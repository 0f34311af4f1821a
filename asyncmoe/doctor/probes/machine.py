"""Facts about a machine: adapters, limits, memory, the clock, host names, ports, and file systems."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from asyncmoe.doctor.facts import Clock, Disk, Fabric, Network, Port, SystemLimits, WantedPort
from asyncmoe.doctor.probes import timeouts
from asyncmoe.doctor.probes.timeouts import Later
from asyncmoe.errors import WaitTimeout

_TIMEDATECTL_S = 5.0
_STA_UNSYNC = 0x0040
"""Flag of `status` in struct timex (adjtimex(2))."""
_RESOLVE_S = 15.0
_CONNECT_S = 5.0
_CHOOSING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_WRITTEN = 1 << 20
"""Bytes to write: enough to hit a full disk or an exhausted quota."""


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
    output = timeouts.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], _TIMEDATECTL_S)
    if output.text.strip() in ("yes", "no"):
        return Clock(output.text.strip() == "yes", "timedatectl")
    return Clock(None, output.trouble or "timedatectl says nothing")


def network() -> Network:
    """Return the network facts of this host."""
    addresses, trouble = resolve(socket.gethostname())
    low, high = map(int, _EPHEMERAL.read_text().split()) if _EPHEMERAL.is_file() else Network.ephemeral
    return Network(
        addresses=addresses,
        name_trouble=trouble,
        loopback_trouble=_loopback(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        chosen={name: os.environ[name] for name in _CHOOSING if os.environ.get(name)},
        ephemeral=(low, high),
    )


def resolve(name: str) -> tuple[tuple[str, ...], str | None]:
    """Return the addresses of a name, or the reason why there are none."""
    asked = Later(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    try:
        found = asked.result("the name service", f"the addresses of {name}", _RESOLVE_S)
    except (OSError, WaitTimeout) as error:
        return (), str(error)
    # A link-local IPv6 address ends with % and the interface.
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)), None


def try_ports(wanted: Sequence[tuple[str, str, int]]) -> tuple[WantedPort, ...]:
    """Test whether the ports, each (key, host, number), can be listened on."""
    return tuple(WantedPort(key, host, number, _refused(host, number)) for key, host, number in wanted)


def disk(directory: Path, checkpoints: int, mounts: Path = Path("/proc/self/mounts")) -> Disk:
    """Test `directory` or its nearest existing parent. The test files are deleted."""
    absolute = directory.absolute()
    probed = next(path for path in (absolute, *absolute.parents) if path.exists())
    room = os.statvfs(probed)
    ahead, trouble = _try_writing(probed)
    return Disk(
        directory=str(directory),
        probed=str(probed),
        kind=kind_of(probed.resolve(), mounts.read_text() if mounts.is_file() else ""),
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,
        checkpoints=checkpoints,
        ahead_s=ahead,
        trouble=trouble,
    )


def kind_of(path: Path, mounts: str) -> str:
    """Return the type of a path's file system from /proc/self/mounts; the last of the longest matching mount points wins."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        point, name = (part.encode().decode("unicode_escape") for part in line.split()[1:3])
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), name
    return kind


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


def _refused(host: str, number: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as tried:
            # Servers set it too, so connections of a finished server in TIME_WAIT are no obstacle.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _loopback() -> str | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), _CONNECT_S):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _try_writing(directory: Path) -> tuple[float | None, str | None]:
    """Return the seconds by which the file system's clock is ahead, or the first failed operation."""
    doing = "making a directory"
    try:
        with tempfile.TemporaryDirectory(prefix=".asyncmoe-doctor-", dir=directory) as made:
            first, second = Path(made) / "first", Path(made) / "second"
            doing = "writing a file"
            now = time.time()
            _write(first)
            ahead = first.stat().st_mtime - now
            _write(second)
            doing = "renaming over a file"
            first.replace(second)
            doing = "renaming a directory"
            (Path(made) / "writing").mkdir()
            (Path(made) / "writing").rename(Path(made) / "done")
            doing = "locking a file"
            with second.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doing = "deleting"
    except OSError as error:
        return None, f"{doing}: {error.strerror or error}"
    return ahead, None


def _write(file: Path) -> None:
    with file.open("wb") as out:
        out.write(bytes(_WRITTEN))
        out.flush()
        os.fsync(out.fileno())
