"""Servers of the Model Context Protocol (MCP) whose tools the policy may call."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from asyncmoe.config.fields import Positive, Seconds, Section, refused, wrong_address


class McpServer(Section):
    """A mapping from names of your choice to MCP servers, each with these keys. A server is either a URL, or a command, which each episode
    starts with your rights."""

    command: str | None = None
    """Program that speaks MCP on standard input and output."""
    args: tuple[str, ...] = ()
    """Arguments of the command."""
    env: dict[str, str] = Field({})
    """Environment variables for the command, which inherits only HOME, LOGNAME, PATH, SHELL, TERM and USER from the rollout worker."""
    env_from: tuple[str, ...] = ()
    """Names of variables of the rollout worker that the command inherits, too; for secrets, which do not belong in the configuration."""
    cwd: Path | None = None
    """Working directory of the command; null: the rollout worker's."""
    url: str | None = None
    """Address of a server that speaks streamable HTTP."""
    token_env: str | None = None
    """Environment variable of the rollout worker that holds the bearer token for the URL."""
    tools: tuple[str, ...] = ()
    """Tools that the policy gets, by the server's names for them; none given: all."""
    prefix: str = ""
    """Prefix for the names of this server's tools, in case two servers have tools of the same name."""
    start_timeout_s: Seconds = 30.0
    """Seconds within which a session must begin and list its tools."""
    timeout_s: Seconds = 30.0
    """Seconds one call may take; tools.on_failure applies to a slower call."""
    characters: Positive = 16384
    """Maximum characters of one answer; tools.on_failure applies to a longer answer."""

    @model_validator(mode="after")
    def _check(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            got = "neither command nor url" if not self.url else "both command and url"
            raise refused("command", got, "one of them: a program to start, or a running server's address")
        if self.url is None and self.token_env is not None:
            raise refused("token_env", self.token_env, "null because a command has no bearer token; use env_from")
        if self.url is not None and (wrong := wrong_address(self.url)) is not None:
            raise refused("url", *wrong)
        for key, value in (("args", self.args), ("env", self.env), ("env_from", self.env_from), ("cwd", self.cwd)):
            if self.url is not None and value:
                raise refused(key, "a value", "none because url is set; only a command uses it")
        return self
