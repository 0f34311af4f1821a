"""The sandboxes of the tool "python", behind one interface (`asyncmoe.rollout.episodes.tools.sandbox.Sandbox`)."""

from __future__ import annotations

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits, PythonTool, Sandbox


def python_tool(limits: PythonLimits, section: SandboxSection | None = None) -> PythonTool:
    """Return the tool "python" with the sandbox that a configuration names; None: the default.

    Raises:
        ConfigError: the sandbox does not work here.
    """
    return PythonTool(limits, _sandbox(limits, section or SandboxSection()))


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
