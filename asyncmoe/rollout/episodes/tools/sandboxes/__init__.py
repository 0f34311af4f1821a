"""The sandboxes of the tool "python", behind one interface (`asyncmoe.rollout.episodes.tools.sandbox.Sandbox`)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits, PythonTool, Sandbox
from asyncmoe.rollout.episodes.tools.tool import ToolError


def python_tool(limits: PythonLimits, section: SandboxSection | None = None) -> PythonTool:
    """Return the tool "python", tried with a program, with the sandbox that a configuration names; None: the default.

    Raises:
        ConfigError: the sandbox does not work here, or a limit is too small for any program.
    """
    sandbox = sandbox_of(limits, section)
    if (got := _tried(sandbox)) is None:
        return PythonTool(limits, sandbox)
    usual = PythonLimits()
    if (section is None or section.url is None) and limits != usual and _tried(sandbox_of(usual, section)) is None:
        expected = "limits within which Python starts"
        raise ConfigError("environment.tools.options.python", got=f"{limits}: {got}", expected=expected, hint=f"the default: {usual}")
    raise ConfigError("environment.sandbox", got=got, expected="a sandbox that runs a program", hint=sandbox.hint)


def sandbox_of(limits: PythonLimits, section: SandboxSection | None = None) -> Sandbox:
    """Return the sandbox that a configuration names; None: the default. Raises ConfigError if what it needs is not installed."""
    section = section or SandboxSection()
    if section.url is not None:
        from asyncmoe.rollout.episodes.tools.sandboxes.remote import RemoteSandbox

        return RemoteSandbox(limits, section)
    from asyncmoe.rollout.episodes.tools.sandboxes.local import LocalSandbox
    from asyncmoe.rollout.episodes.tools.sandboxes.walls import Bubblewrap, Container

    return LocalSandbox(limits, (Bubblewrap if section.image is None else Container)(limits, section))


def _tried(sandbox: Sandbox) -> str | None:
    """Return what went wrong with a first program; None: nothing."""

    async def first() -> str | None:
        try:
            ended = await sandbox.run(b"print('ready')")
        except ToolError as error:
            return error.detail.removeprefix("error: the sandbox failed: ")
        finally:
            await sandbox.close()
        if ended.status == 0 and ended.timeout is None and "ready\n".startswith(ended.output) and ended.output:
            return None
        return f"{sandbox.name}: {ended} of print('ready')"

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, first()).result()
