"""Check system resources: shared memory, open files, the sandbox of the tool python."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.doctor import finding
from asyncmoe.doctor.finding import Finding
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.loading import python_tool
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.storage import size

_SHM_BYTES = 1 << 30
"""Shared memory for SGLang's processes and NCCL; Docker's default is 64 MB."""
_OPEN_FILES = 4096
"""File descriptors of a process for engines, checkpoint shards and sockets, excluding requests."""


def shm(folder: Path = Path("/dev/shm")) -> Finding:
    """Check that /dev/shm has room for SGLang and NCCL."""
    if not folder.is_dir():
        return finding.error("there is no /dev/shm", "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm")
    room = os.statvfs(folder)
    told = f"{size(room.f_bavail * room.f_frsize)} free of {size(room.f_blocks * room.f_frsize)}"
    if room.f_bavail * room.f_frsize < _SHM_BYTES:
        hint = "docker run --shm-size=8g, or as root: mount -o remount,size=8G /dev/shm"
        return finding.warning(f"{told}, expected {size(_SHM_BYTES)}", hint)
    return finding.ok(told)


def open_files(config: Config | None) -> Finding:
    """Check that the file descriptor limit covers every socket and file of the busiest process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OPEN_FILES + 2 * (config.max_concurrent if config is not None else 0)
    if soft >= needed:
        return finding.ok(f"limit {soft} (hard limit {hard})")
    root = f"as root: nofile {needed} in /etc/security/limits.conf, LimitNOFILE= of slurmd or the container"
    hint = f"ulimit -n {needed} in the shell or the batch script" if hard >= needed else root
    return finding.warning(f"limit {soft} (hard limit {hard}); a run may need {needed}", hint)


def sandbox() -> Finding:
    """Check that the default sandbox of the tool python runs a program here."""
    try:
        python_tool(PythonLimits(), SandboxSection())
    except ConfigError as error:
        hint = f"for the tool python: {error.hint}"
        return finding.warning(f"the default sandbox is refused: {error.got}", hint)
    return finding.ok("the tool python runs its programs in bubblewrap")
