"""The environment of an episode."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from asyncmoe import plugins
from asyncmoe.config.fields import NameOrPlugin, Positive, Seconds, Section, refused
from asyncmoe.config.mcp import McpServer
from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.config.tool_parsers import SGLANG_PARSERS

_OWN_STYLES = ("hermes", "brackets")


class ToolsSection(Section):
    """Tools the policy may call with environment.kind tools. With environment.kind openai, only `style` applies."""

    names: tuple[str, ...] = ()
    """Tools by name: calculator, python (sandboxed), or your own functions as package.module:function."""
    style: str = "hermes"
    """Syntax of a tool call in a response. hermes: <tool_call> around a JSON object with name and arguments; brackets: [name: argument],
    for models so small that every token counts; or one of SGLang's parsers, such as qwen3_coder or deepseekv3. environment.kind openai
    returns the calls in the form of its API, and refuses brackets, because such a call may lack the tool's name."""
    schemas: bool | None = None
    """Give the tools' schemas to the chat template, which describes them to the policy. null: true if style is not brackets and the task
    has chat prompts."""
    options: dict[str, dict[str, Any]] = Field({})
    """A mapping from the name of a tool or function to its limits: timeout_s, concurrency, and characters (of the answer); python has
    more."""
    on_failure: Literal["observe", "reject"] = "observe"
    """What happens if a call takes too long, returns too much or is killed, or an episode reaches its limit on turns or tokens. observe:
    the policy reads a message about such a call; at such a limit, the last response is scored. reject: the episode is rejected, as it
    always is if the tool itself fails."""
    mcp: dict[str, McpServer] = Field({})
    mcp_sessions: Positive = 64
    """Maximum simultaneous sessions with MCP servers, over all episodes; each session with a command is a process. If all are in use, an
    episode waits at its first call."""

    @model_validator(mode="after")
    def _check(self) -> ToolsSection:
        for name in self.mcp:
            if not name.replace("-", "_").isidentifier():
                raise refused("environment.tools.mcp", f"the name {name!r}", "letters, digits, '_' and '-'")
        return self

    @field_validator("style")
    @classmethod
    def _known_style(cls, style: str) -> str:
        if style not in (*_OWN_STYLES, *SGLANG_PARSERS):
            near = plugins.nearest(style, (*_OWN_STYLES, *SGLANG_PARSERS))
            hint = f"; did you mean {near}?" if near else ""
            expected = f"{', '.join(_OWN_STYLES)} or a parser of SGLang ({', '.join(SGLANG_PARSERS)})"
            raise refused("environment.tools.style", f"{style!r}", f"{expected}{hint}")
        return style


class EnvironmentSection(Section):
    """What happens in an episode between prompt and reward: turns, tool calls, several agents."""

    kind: Annotated[str, NameOrPlugin(("single_turn", "tools", "openai"))] = "single_turn"
    """single_turn: one response to the prompt; tools: several turns with tool calls between them; openai: your own agent, which calls an
    endpoint compatible with OpenAI's or Anthropic's; or your own class as package.module:Class."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of your own class."""
    agent: str | None = None
    """For kind openai: the agent, as package.module:function."""
    tools: ToolsSection = ToolsSection()
    sandbox: SandboxSection = SandboxSection()
    max_turns: Positive = 8
    """Maximum responses of an agent in an episode; an episode with more is rejected (with kind tools, tools.on_failure decides)."""
    max_agents: Positive = 8
    """Maximum agents in an episode; the conversation of each becomes a trajectory."""
    max_paths: Positive = 32
    """Maximum paths in the tree of an agent's turns. The tree branches where the agent forks, edits or cuts its history; each path becomes
    a trajectory."""
    max_tokens: Positive | None = None
    """Maximum tokens of an agent's conversation; null: the model's context length."""
    timeout_s: Seconds = 600.0
    """Seconds an episode may take, not counting scoring; a slower episode is rejected."""

    @model_validator(mode="after")
    def _check(self) -> EnvironmentSection:
        if self.kind == "tools" and not self.tools.names and not self.tools.mcp:
            hint = "name one, name a server in environment.tools.mcp, or set environment.kind to single_turn"
            raise refused("environment.tools.names", "nothing", "at least one tool because environment.kind is tools", hint)
        if self.kind != "tools" and self.tools.mcp:
            hint = "set environment.kind to tools, or pass the servers to your own class: WithTools(mcp=...)"
            raise refused("environment.tools.mcp", "servers", f"none because environment.kind is {self.kind}", hint)
        if self.sandbox != SandboxSection() and (self.kind != "tools" or "python" not in self.tools.names):
            expected = "no keys because only environment.kind tools with python in environment.tools.names uses them"
            hint = "a class of your own passes them to WithTools(sandbox=...)"
            raise refused("environment.sandbox", "keys", expected, hint)
        if self.kind == "openai" and self.tools.style == "brackets":
            expected = "hermes or a parser of SGLang because environment.kind is openai, whose clients need calls with a name; leave it out"
            raise refused("environment.tools.style", "'brackets'", expected)
        if self.kind == "openai" and self.agent is None:
            raise refused("environment.agent", "nothing", "package.module:function because environment.kind is openai; name your agent")
        return self
