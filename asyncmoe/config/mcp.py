"""Servers of the Model Context Protocol (MCP) whose tools the policy may call."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from asyncmoe.config.fields import Positive, PositiveFloat, Section

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class McpServer(Section):
    """A mapping: MCP servers by a name of your choice, each with these keys. A server is either a command, started with your rights for
    each episode, or a URL."""

    command: str | None = Field(None, description="Program that speaks MCP on standard input and output.")
    args: tuple[str, ...] = Field((), description="Arguments of the command.")
    env: dict[str, str] = Field(
        {}, description="Variables of the command. It gets no other variable of the controller's, except HOME, LANG, PATH and USER."
    )
    env_from: tuple[str, ...] = Field(
        (), description="Names of variables that the command gets from the controller's environment; for secrets, which do not belong here."
    )
    cwd: str | None = Field(None, description="Working directory of the command; null: the controller's.")
    url: str | None = Field(None, description="Address of a server that speaks streamable HTTP.")
    token_env: str | None = Field(None, description="Variable of the controller's environment with the URL's bearer token.")
    tools: tuple[str, ...] = Field((), description="Tools that the policy gets, by the server's names; none: all.")
    prefix: str = Field("", description="Prefix of the tools' names, for servers with tools of the same name.")
    start_timeout_s: PositiveFloat = Field(30.0, description="Seconds in which a session must begin and list its tools.")
    timeout_s: PositiveFloat = Field(30.0, description="Seconds of one call; a slower one rejects its episode.")
    characters: Positive = Field(16384, description="Maximum characters of one answer; a longer one rejects its episode.")

    @model_validator(mode="after")
    def _check(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            got = "neither" if self.command is None else "both"
            raise ValueError(f"command, url: got {got}, expected one of the two: command for a program, url for a server that runs")
        if self.url is not None:
            self._check_url(self.url)
        elif not self.command:
            raise ValueError("command: got nothing, expected a program")
        if self.command is not None and self.token_env is not None:
            raise ValueError(f"token_env: got {self.token_env}, expected null because a command has no bearer token; use env_from")
        for name in (*self.env, *self.env_from, *([] if self.token_env is None else [self.token_env])):
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"env: got {name!r}, expected the name of an environment variable")
        if any("\0" in text for text in (self.command or "", self.cwd or "", *self.args, *self.env.values())):
            raise ValueError("command: got a zero byte, expected text without one")
        return self

    def _check_url(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: got {url!r}, expected http://... or https://...")
        if parts.username is not None or parts.password is not None:
            raise ValueError("url: got one with a user's name or password, expected none; put the token into a variable: token_env")
        given = [name for name, value in (("args", self.args), ("env", self.env), ("env_from", self.env_from), ("cwd", self.cwd)) if value]
        if given:
            raise ValueError(f"{given[0]}: got a value, expected none because the server is a url; it belongs to a command")
