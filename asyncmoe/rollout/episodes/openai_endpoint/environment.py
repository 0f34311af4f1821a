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
            return cast(Rewards, await _called(partial(self._function, url, session.key, asked.text, asked.answer, **columns)))
        finally:
            await self._endpoint.end(session)

    async def close(self) -> None:
        """Stop the endpoint."""
        await self._endpoint.close()


async def _called(ask: Callable[[], Any]) -> object:
    """Call a coroutine function or a plain one in a thread (and an event loop) of its own, so that it cannot block ours.

    Returns its result, or raises its exception, as a RuntimeError if it is a BaseException but not an Exception. If this is cancelled,
    so is the coroutine; a plain function cannot be cancelled, and runs to its end.
    """
    result: Future[object] = Future()
    result.set_running_or_notify_cancel()  # a caller that stops waiting cancels the task
    tasks: list[asyncio.Task[Any]] = []
    cancelled = threading.Event()

    async def awaited() -> object:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        if cancelled.is_set():
            raise asyncio.CancelledError
        return await ask()

    def run() -> None:
        try:
            result.set_result(asyncio.run(awaited()) if inspect.iscoroutinefunction(ask) else ask())
        except BaseException as error:  # noqa: BLE001  passed to the caller, in the caller's thread
            passes = isinstance(error, Exception) and not isinstance(error, StopIteration)  # asyncio's futures refuse StopIteration
            result.set_exception(error if passes else RuntimeError(plugins.told(error)))

    threading.Thread(target=run, name="agent", daemon=True).start()
    try:
        return await asyncio.wrap_future(result)
    except asyncio.CancelledError:
        cancelled.set()  # before reading the tasks: `awaited` reads this after adding its task
        for task in tasks:
            with suppress(RuntimeError):  # the loop may have just ended
                task.get_loop().call_soon_threadsafe(task.cancel)
        raise
