"""Servers of the Model Context Protocol (MCP) whose tools the policy may call."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from asyncmoe.config.fields import Positive, Seconds, Section, refused, wrong_address


class McpServer(Section):
    """A mapping: MCP servers by a name of your choice, each with these keys. A server is either a command, started with your rights for
    each episode, or a URL."""

    command: str | None = Field(None, description="Program that speaks MCP on standard input and output.")
    args: tuple[str, ...] = Field((), description="Arguments of the command.")
    env: dict[str, str] = Field(
        {},
        description="Variables of the command. It gets no other variable of the rollout worker's, except HOME, LOGNAME, PATH, SHELL, TERM "
        "and USER.",
    )
    env_from: tuple[str, ...] = Field(
        (),
        description="Names of variables of the rollout worker that the command gets; for secrets, which do not belong here.",
    )
    cwd: Path | None = Field(None, description="Working directory of the command; null: the rollout worker's.")
    url: str | None = Field(None, description="Address of a server that speaks streamable HTTP.")
    token_env: str | None = Field(None, description="Variable of the rollout worker's environment with the URL's bearer token.")
    tools: tuple[str, ...] = Field((), description="Tools that the policy gets, by the server's names; none: all.")
    prefix: str = Field("", description="Prefix of the tools' names, for servers with tools of the same name.")
    start_timeout_s: Seconds = Field(30.0, description="Seconds in which a session must begin and list its tools.")
    timeout_s: Seconds = Field(30.0, description="Seconds of one call; a slower one rejects its episode.")
    characters: Positive = Field(16384, description="Maximum characters of one answer; a longer one rejects its episode.")

    @model_validator(mode="after")
    def _check(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            got = "neither it nor url" if not self.url else "both it and url"
            raise refused("command", got, "one of them: a program, or a server that runs")
        if self.url is None and self.token_env is not None:
            raise refused("token_env", self.token_env, "null because a command has no bearer token; use env_from")
        if self.url is not None and (wrong := wrong_address(self.url)) is not None:
            raise refused("url", *wrong)
        for key, value in (("args", self.args), ("env", self.env), ("env_from", self.env_from), ("cwd", self.cwd)):
            if self.url is not None and value:
                raise refused(key, "a value", "none because the server is a url; it belongs to a command")
        return self
