"""Episodes driven by an agent that speaks OpenAI's chat completions or Responses API, or Anthropic's Messages API."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, cast

from asyncmoe import plugins
from asyncmoe.rollout.episodes.environment import Episode, Rewards
from asyncmoe.rollout.episodes.openai_endpoint.server import OpenAIEndpoint
from asyncmoe.rollout.episodes.tools.calls import HERMES


class OpenAIEnvironment:
    """Runs a user's agent; every episode has its own endpoint.

    The agent is `async def agent(base_url: str, api_key: str, prompt: str, answer: str) -> Rewards`, or the same without `async`. It
    may also take `columns`, the example's other columns. It returns the episode's reward, None if the configured scorer scores the episode,
    or whatever else an environment may return. It runs in a thread of its own, so it may block. It sends requests with
    `openai.AsyncOpenAI(base_url=base_url, api_key=api_key)` or any other client; every model name means the policy, and names an agent.

    Args:
        agent: `package.module:function`.
        style: as `environment.tools.style`.

    Raises:
        ConfigError: no such function.
    """

    def __init__(self, agent: str, style: str = HERMES) -> None:
        self._function = plugins.load_function(agent, "environment.agent", forms="package.module:function")
        self._takes_columns = plugins.takes(self._function, "columns")
        self._endpoint = OpenAIEndpoint(style)

    async def run(self, episode: Episode) -> Rewards:
        """See `Environment`."""
        session, url = await self._endpoint.open(episode)
        asked = episode.prompt
        columns = {"columns": asked.columns} if self._takes_columns else {}
        try:
            return cast(Rewards, await _Call(partial(self._function, url, session.key, asked.text, asked.answer, **columns)).ended())
        finally:
            await self._endpoint.end(session)

    async def close(self) -> None:
        """Stop the endpoint."""
        await self._endpoint.close()


class _Call(threading.Thread):
    """A call of a coroutine function or a plain one in a thread (and an event loop) of its own, so that it cannot block ours."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(name="agent", daemon=True)
        self._ask, self._awaits = ask, inspect.iscoroutinefunction(ask)
        self._result: Future[object] = Future()
        self._result.set_running_or_notify_cancel()  # a caller that stops waiting cancels the task
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    async def ended(self) -> object:
        """Return the function's result, or raise its exception, as a RuntimeError if it is a BaseException but not an Exception.

        If this is cancelled, so is the coroutine; a plain function cannot be cancelled, and runs to its end.
        """
        self.start()
        try:
            return await asyncio.wrap_future(self._result)
        except asyncio.CancelledError:
            self._cancelled = True  # set before reading the task: `_awaited` reads this after setting it
            if self._task is not None:
                with suppress(RuntimeError):  # the loop may have just ended
                    self._task.get_loop().call_soon_threadsafe(self._task.cancel)
            raise

    def run(self) -> None:
        """Call the function; in the new thread."""
        try:
            self._result.set_result(asyncio.run(self._awaited()) if self._awaits else self._ask())
        except BaseException as error:  # noqa: BLE001  passed to the caller, in the caller's thread
            passes = isinstance(error, Exception) and not isinstance(error, StopIteration)  # asyncio's futures refuse StopIteration
            self._result.set_exception(error if passes else RuntimeError(plugins.told(error)))

    async def _awaited(self) -> object:
        self._task = asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        return await self._ask()
