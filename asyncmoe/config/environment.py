"""The environment of an episode."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import NameOrPlugin, Positive, PositiveFloat, Section

CallStyle = Literal["hermes", "brackets"]


class ToolsSection(Section):
    """Tools the policy may call; for environment.kind tools."""

    names: tuple[str, ...] = Field(
        (), description="Tools by name: calculator, python (sandboxed), or your own functions as package.module:function."
    )
    style: CallStyle = Field(
        "hermes",
        description="Syntax of a call in a response. hermes: <tool_call> around a JSON object with name and arguments; brackets: "
        "[name: argument], for models so small that every token counts.",
    )
    options: dict[str, dict[str, Any]] = Field(
        {},
        description="Limits by tool name (of your own function: its name or package.module:function): timeout_s, concurrency and "
        "characters of the answer; python has limits of its own besides.",
    )


class EnvironmentSection(Section):
    """What happens in an episode between prompt and reward: turns, tool calls, several agents."""

    kind: Annotated[str, NameOrPlugin(("single_turn", "tools", "openai"))] = Field(
        "single_turn",
        description="single_turn: one response to the prompt; tools: several turns with tool calls between them; openai: your own agent, "
        "which calls an endpoint compatible with OpenAI's or Anthropic's; or your own class as package.module:Class.",
    )
    options: dict[str, Any] = Field({}, description="Keyword arguments of your own class.")
    agent: str | None = Field(None, description="For kind openai: the agent, as package.module:function.")
    on_conflict: Literal["run", "refuse"] = Field(
        "run",
        description="For kind openai: a request that asks for other sampling than the run's, such as another temperature, a seed or a JSON "
        "schema. run: the run's own sampling is used, and the answer's header asyncmoe-overridden names the parameter; refuse: error 400.",
    )
    tools: ToolsSection = ToolsSection()
    max_turns: Positive = Field(8, description="Maximum responses of an agent in an episode; an episode with more is rejected.")
    max_agents: Positive = Field(8, description="Maximum agents in an episode; the conversation of each becomes a trajectory.")
    max_tokens: Positive | None = Field(None, description="Maximum tokens of an agent's conversation; null: the model's context length.")
    timeout_s: PositiveFloat = Field(600.0, description="Seconds an episode may take before scoring; a slower one is rejected.")

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
