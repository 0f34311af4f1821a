"""Programs in the default sandbox, for tests."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import python_tool
from asyncmoe.rollout.episodes.tools.tool import ToolError

LIMITS = PythonLimits(wall_s=60.0)
"""On a machine that has other work, too."""
NOBODY = 65534


def limited(**limits: float) -> PythonLimits:
    return PythonLimits.model_validate({**LIMITS.model_dump(), **limits})


def why_not() -> str | None:
    if not sys.platform.startswith("linux"):
        return "not Linux"
    try:
        python_tool(LIMITS)
    except ConfigError as error:
        return str(error)
    return None


NO_SANDBOX = why_not()
SANDBOX = pytest.mark.skipif(NO_SANDBOX is not None, reason=str(NO_SANDBOX))


async def called(code: str, limits: PythonLimits = LIMITS, section: SandboxSection | None = None) -> str:
    """What it printed, or the reason and the detail why there is no result."""
    python = await asyncio.to_thread(python_tool, limits, section)
    try:
        return await python.call(code)
    except ToolError as error:
        return f"{error.reason}: {error.detail}"
    finally:
        await python.close()


def run(code: str, limits: PythonLimits = LIMITS, section: SandboxSection | None = None) -> str:
    return asyncio.run(called(code, limits, section))


def running(mark: str) -> list[str]:
    """Command lines of this machine that have a mark, but this process's own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if mark in command and int(entry.name) != os.getpid():
            found.append(command)
    return found
