"""Servers of the Model Context Protocol (MCP) whose tools the policy may call."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from asyncmoe.config.fields import Positive, Seconds, Section, refused, wrong_address


class McpServer(Section):
    """A mapping: MCP servers by a name of your choice, each with these keys. A server is either a command, started with your rights for
    each episode, or a URL."""

    command: str | None = None
    """Program that speaks MCP on standard input and output."""
    args: tuple[str, ...] = ()
    """Arguments of the command."""
    env: dict[str, str] = Field({})
    """Environment variables of the command. Of the rollout worker's variables the command gets only HOME, LOGNAME, PATH, SHELL, TERM and
    USER."""
    env_from: tuple[str, ...] = ()
    """Names of further variables of the rollout worker that the command gets; for secrets, which do not belong in the configuration."""
    cwd: Path | None = None
    """Working directory of the command; null: the rollout worker's."""
    url: str | None = None
    """Address of a server that speaks streamable HTTP."""
    token_env: str | None = None
    """Variable of the rollout worker's environment with the URL's bearer token."""
    tools: tuple[str, ...] = ()
    """Names, at the server, of the tools that the policy gets; none: all."""
    prefix: str = ""
    """Prefix of the tools' names, for servers with tools of the same name."""
    start_timeout_s: Seconds = 30.0
    """Seconds in which a session must begin and list its tools."""
    timeout_s: Seconds = 30.0
    """Seconds of one call; a slower one rejects its episode."""
    characters: Positive = 16384
    """Maximum characters of one answer; a longer one rejects its episode."""

    @model_validator(mode="after")
    def _check(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            got = "neither command nor url" if not self.url else "both command and url"
            raise refused("command", got, "one of them: a program, or a server that runs")
        if self.url is None and self.token_env is not None:
            raise refused("token_env", self.token_env, "null because a command has no bearer token; use env_from")
        if self.url is not None and (wrong := wrong_address(self.url)) is not None:
            raise refused("url", *wrong)
        for key, value in (("args", self.args), ("env", self.env), ("env_from", self.env_from), ("cwd", self.cwd)):
            if self.url is not None and value:
                raise refused(key, "a value", "none because the server is a url; it belongs to a command")
        return self
