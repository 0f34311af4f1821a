"""What this machine has to confine the programs of the tool python with."""

from __future__ import annotations

import shutil

from asyncmoe.doctor.facts import SandboxFacts
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import python_tool
from asyncmoe.rollout.episodes.tools.sandboxes.kernel_support import landlock_version

_PROGRAMS = ("bwrap", "docker", "podman")


def look() -> SandboxFacts:
    """Run a program in the default sandbox, and look for what the other backends need."""
    there = tuple(program for program in _PROGRAMS if shutil.which(program))
    try:
        python_tool(PythonLimits())
    except ConfigError as error:
        return SandboxFacts(landlock_version(), there, trouble=str(error.got), hint=error.hint)
    return SandboxFacts(landlock_version(), there)
