"""Turns with tool calls between them.

A response that calls tools is followed by what they answer, and the policy goes on; one that calls none ends the episode, which the
configured scorer then scores. What tools say is given, not sampled: it is not trained on. No engine waits for a tool: while one works, the
episode has no request anywhere.

An ordinary mistake (a wrong expression, code that raises) is an observation like any other: the policy learns from it. A tool that hangs,
breaks or floods ends the episode under that reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes import tools
from asyncmoe.rollout.episodes.environment import Agent, Episode, Response
from asyncmoe.rollout.episodes.tools.calls import Call, Malformed, Style, find
from asyncmoe.rollout.episodes.tools.runner import Counts, Runner
from asyncmoe.rollout.episodes.tools.tool import ERROR, ToolError
from asyncmoe.rollout.tokenizer import Tokenizer


class WithTools:
    """See the module.

    Args:
        names, options: as for `asyncmoe.rollout.episodes.tools.load`.
        style: how a response calls one.
        chat: observations are turns of a conversation in the tokenizer's chat template; else each is a line.

    Attributes:
        runners: the tools by name; the first is called where a call names none.
    """

    def __init__(
        self, names: Sequence[str], style: Style = "hermes", chat: bool = True, options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.runners: dict[str, Runner] = tools.load(names, options)
        self._style, self._chat = style, chat

    async def run(self, episode: Episode) -> float | None:
        """See `Environment`."""
        agent = episode.agent()
        agent.see(episode.prompt.tokens)
        await self.converse(agent, episode.tokenizer)
        return None

    async def converse(self, agent: Agent, tokenizer: Tokenizer) -> Response:
        """Responses of an agent and answers of its tools in turn; the response that calls none."""
        while True:
            response = await agent.respond()
            calls = find(response.text, self._style)
            if not calls or response.finish == "length":
                return response
            observations = await asyncio.gather(*(self._observe(call) for call in calls))
            agent.see(tokenizer.between(observations) if self._chat else "".join(f"{line}\n" for line in observations))

    @property
    def counts(self) -> dict[str, Counts]:
        """What the calls came to, by the tool's name."""
        return {name: runner.counts for name, runner in self.runners.items()}

    async def close(self) -> None:
        """End what the tools started."""
        await asyncio.gather(*(runner.close() for runner in self.runners.values()))

    async def _observe(self, call: Call | Malformed) -> str:
        if isinstance(call, Malformed):
            return call.why
        runner = self.runners.get(call.name) if call.name is not None else next(iter(self.runners.values()))
        if runner is None:
            return f"error: no tool named {call.name}; there are {', '.join(self.runners)}"
        try:
            return await runner.call(call.argument)
        except ToolError as error:
            if error.reason == ERROR:
                return error.detail
            raise TrajectoryRejected(error.reason, error.detail[:200]) from error
