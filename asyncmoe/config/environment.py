"""What a policy meets in an episode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import Positive, PositiveFloat, Section

CallStyle = Literal["hermes", "brackets"]


class ToolsSection(Section):
    """environment.kind tools: what the policy may call."""

    names: tuple[str, ...] = Field((), description="calculator, python, or your own as package.module:function.")
    style: CallStyle = Field(
        "hermes",
        description="How a response calls one. hermes: <tool_call> around a JSON object of name and arguments; brackets: [name: argument].",
    )
    options: dict[str, dict[str, Any]] = Field(
        {}, description="By a tool's name: timeout_s, concurrency and characters of its answer; python also its limits."
    )


class EnvironmentSection(Section):
    """What happens in an episode, between its prompt and its reward."""

    kind: str = Field(
        "single_turn",
        description="single_turn: one response to the prompt; tools: turns with tool calls between them; openai: an agent of yours that "
        "speaks to an OpenAI-compatible endpoint; or your own class as package.module:Class.",
    )
    options: dict[str, Any] = Field({}, description="Your own class: keyword arguments it is made with.")
    agent: str | None = Field(None, description="openai: the agent, package.module:function.")
    tools: ToolsSection = ToolsSection()
    max_turns: Positive = Field(8, description="Responses of one agent in an episode.")
    max_agents: Positive = Field(8, description="Conversations in an episode; each becomes a trajectory.")
    max_tokens: Positive | None = Field(None, description="Tokens of one agent's conversation; default: the model's positions.")
    timeout_s: PositiveFloat = Field(600.0, description="How long one episode may take, before it is scored.")

    @model_validator(mode="after")
    def _check(self) -> EnvironmentSection:
        if self.kind == "tools" and not self.tools.names:
            raise ValueError(
                "environment.tools.names: got nothing, expected at least one tool because environment.kind is tools; name one, or set "
                "environment.kind to single_turn"
            )
        if self.kind == "openai" and self.agent is None:
            raise ValueError(
                "environment.agent: got nothing, expected package.module:function because environment.kind is openai; give the agent"
            )
        return self
