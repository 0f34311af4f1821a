"""An environment whose responses may call tools.

After a response with tool calls, the policy sees the tools' answers and continues; a response without calls ends the episode, which the
configured scorer then scores. Tool answers are given, not sampled, so they are not trained on. No engine waits for a tool: while a tool
works, the episode has no request in flight.

A mistake (a wrong expression, code that raises) is an observation like any other, and the policy learns from it. A call that takes too
long, prints too much or is killed is an observation, too, and an episode that reaches a limit gets its last response scored, unless
`on_failure` is "reject". A tool that fails by itself always rejects the episode, for the reason "tool_crash".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

from asyncmoe.config.mcp import McpServer
from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError, TrajectoryRejected
from asyncmoe.rollout.async_tasks import together
from asyncmoe.rollout.episodes.environment import Agent, Episode, Response
from asyncmoe.rollout.episodes.tools.calls import BRACKETS, HERMES, Call, read_calls, written_id
from asyncmoe.rollout.episodes.tools.loading import load
from asyncmoe.rollout.episodes.tools.mcp import McpTools
from asyncmoe.rollout.episodes.tools.runner import Runner
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, ToolError
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.telemetry.rollout_schema import Calls

log = logging.getLogger(__name__)


class WithTools:
    """An environment with tools; see the module.

    Args:
        names, options, sandbox: as for `asyncmoe.rollout.episodes.tools.loading.load`.
        style: as environment.tools.style.
        chat: if true, observations are messages of the tokenizer's chat template; else each is a line.
        schemas: as environment.tools.schemas.
        mcp, sessions: as for `asyncmoe.rollout.episodes.tools.mcp.McpTools`.
        on_failure: as environment.tools.on_failure.

    Attributes:
        runners: the tools by name; a call without a name goes to the first.
    """

    def __init__(
        self,
        names: Sequence[str],
        style: str = HERMES,
        chat: bool = True,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        schemas: bool | None = None,
        mcp: Mapping[str, McpServer | Mapping[str, Any]] | None = None,
        sessions: int = 64,
        sandbox: SandboxSection | Mapping[str, Any] | None = None,
        on_failure: Literal["observe", "reject"] = "observe",
    ) -> None:
        self._mcp = McpTools(mcp or {}, sessions, load(names, options, sandbox))
        self.runners: dict[str, Runner] = self._mcp.runners
        self._style, self._chat, self._wanted, self._observes = style, chat, schemas, on_failure == "observe"
        self._described: tuple[Mapping[str, Any], ...] | None = None

    async def run(self, episode: Episode) -> float | None:
        """See `Environment`."""
        agent = episode.agent()
        agent.see(self.asked(episode.prompt, episode.tokenizer))
        before = sum(len(message.get("tool_calls") or ()) for message in episode.prompt.messages)
        await self.converse(agent, episode.tokenizer, before)
        return None

    def asked(self, prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens of a prompt; for messages, include the tools' schemas where the chat template puts them."""
        schemas = self.described(tokenizer)
        return tokenizer.encode(tokenizer.render(prompt.messages, schemas)) if schemas and prompt.messages else prompt.tokens

    def described(self, tokenizer: Tokenizer) -> tuple[Mapping[str, Any], ...]:
        """Return the schemas for the chat template, () if it should not describe the tools.

        Raises:
            ConfigError: the template leaves tools out, but `schemas` is true; if `schemas` is None, this is only logged, once.
        """
        if self._described is None:
            wanted = self._wanted or (self._wanted is None and self._chat and self._style != BRACKETS)
            lacks = wanted and tokenizer.lacks("tools")
            if lacks and self._wanted:
                got, hint = "true, but the chat template leaves tools out", "set it to false and describe the tools in task.system_prompt"
                raise ConfigError("environment.tools.schemas", got=got, expected="a chat template that describes tools", hint=hint)
            if lacks:
                log.warning("the chat template leaves tools out: the prompt must describe them to the policy (environment.tools.schemas)")
            self._described = self._schemas if wanted and not lacks else ()
        return self._described

    @property
    def _schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(runner.schema for runner in self.runners.values())

    async def converse(self, agent: Agent, tokenizer: Tokenizer, before: int = 0) -> Response:
        """Alternate responses and tool answers; return the first response that calls no tool, reaches its length limit or, if failures are
        observed, leaves no room for another.

        Args:
            before: number of calls in the conversation so far, from which some styles continue to number calls.
        """
        async with self.sessions():
            while True:
                response = await agent.respond()
                calls, _ = await read_calls(agent, response, self._style, self._schemas, response.text)
                if not calls or response.finish == "length":
                    return response
                observations = await together([self._noted(agent, call) for call in calls])
                ids = [written_id(self._style, str(call.name), number) for number, call in enumerate(calls, before)]
                before += len(calls)
                agent.see(tokenizer.between(observations, ids) if self._chat else "".join(f"{line}\n" for line in observations))
                if self._observes and agent.limit:
                    return response

    def sessions(self) -> AbstractAsyncContextManager[None]:
        """Keep sessions with MCP servers open until the end of the block; for an episode of several conversations."""
        return self._mcp.episode()

    @property
    def counts(self) -> dict[str, Calls]:
        """Statistics of the calls, by the tool's name."""
        return {name: runner.counts for name, runner in self.runners.items()}

    async def close(self) -> None:
        """End everything the tools started."""
        await asyncio.gather(self._mcp.close(), *(runner.close() for runner in self.runners.values()))

    async def _noted(self, agent: Agent, call: Call) -> str:
        """Return the observation, and note the call."""
        begin, name = time.perf_counter(), None if call.wrong else call.name or next(iter(self.runners))
        try:
            observation = call.wrong or await self._observed(str(name), call.arguments)
        except ToolError as error:
            rejected = TrajectoryRejected(error.reason, error.detail[:200])
            agent.note_call(name, call.arguments, str(rejected), time.perf_counter() - begin)
            raise rejected from error
        agent.note_call(name, call.arguments, observation, time.perf_counter() - begin)
        return observation

    async def _observed(self, name: str, arguments: str) -> str:
        if (runner := self.runners.get(name)) is None:
            return f"error: no tool named {name}; there are {', '.join(self.runners)}"
        try:
            return await runner.call(arguments)
        except ToolError as error:
            if error.reason == ERROR or (self._observes and error.reason != CRASH):
                return error.detail
            raise
