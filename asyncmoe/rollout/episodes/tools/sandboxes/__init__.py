"""The sandboxes of the tool "python", behind one interface (`asyncmoe.rollout.episodes.tools.sandbox.Sandbox`)."""

from __future__ import annotations

from dataclasses import replace

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits, PythonTool, Sandbox

_BOUNDING = ("wall_s", "cpu_s", "memory_bytes", "file_bytes", "open_files")
"""The limits that can end a program before its first line."""


def python_tool(limits: PythonLimits, section: SandboxSection | None = None) -> PythonTool:
    """Return the tool "python" with the sandbox that a configuration names; None: the default.

    Raises:
        ConfigError: the sandbox does not work here, or a limit is too small for any program.
    """
    placed = section or SandboxSection()
    try:
        return PythonTool(limits, _sandbox(limits, placed))
    except ConfigError as refused:
        if placed.backend == "http":  # its message has the server's own words
            raise
        raise _too_small(limits, placed) or refused from refused


def _too_small(limits: PythonLimits, section: SandboxSection) -> ConfigError | None:
    """Return the error for limits within which no program runs; None if programs do not run within the defaults either."""
    defaults = PythonLimits(namespaces=limits.namespaces)
    lowered = {name: (getattr(limits, name), most) for name in _BOUNDING if getattr(limits, name) < (most := getattr(defaults, name))}
    if not lowered or not _runs(defaults, section):
        return None
    alone = {name: of for name, of in lowered.items() if not _runs(replace(defaults, **{name: of[0]}), section)}
    # Limits may also be too small only together, or only for a busy machine.
    wrong = alone or lowered
    got, usual = (", ".join(f"{name} {of[i]}" for name, of in wrong.items()) for i in (0, 1))
    return ConfigError(
        "environment.tools.options.python", got=got, expected="limits within which Python starts", hint=f"the default: {usual}"
    )


def _runs(limits: PythonLimits, section: SandboxSection) -> bool:
    try:
        _sandbox(limits, section).probe()
    except ConfigError:
        return False
    return True


def _sandbox(limits: PythonLimits, section: SandboxSection) -> Sandbox:
    from asyncmoe.rollout.episodes.tools.sandboxes.bubblewrap import Bubblewrap
    from asyncmoe.rollout.episodes.tools.sandboxes.container import ContainerSandbox
    from asyncmoe.rollout.episodes.tools.sandboxes.guarded import Guarded
    from asyncmoe.rollout.episodes.tools.sandboxes.own import Own
    from asyncmoe.rollout.episodes.tools.sandboxes.remote import RemoteSandbox

    match section.backend:
        case "asyncmoe":
            return Guarded(limits, Own(limits))
        case "bubblewrap":
            return Guarded(limits, Bubblewrap(limits))
        case "container":
            return Guarded(limits, ContainerSandbox(limits, section))
        case "http":
            return RemoteSandbox(limits, section)
