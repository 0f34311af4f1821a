"""Episodes driven by an agent that speaks OpenAI's chat completions or Responses API, or Anthropic's Messages API."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import cast

from asyncmoe import plugins
from asyncmoe.errors import TrajectoryRejected, UserError
from asyncmoe.rollout.episodes.environment import Episode, Rewards
from asyncmoe.rollout.episodes.openai_endpoint.answers import HERMES
from asyncmoe.rollout.episodes.openai_endpoint.server import OpenAIEndpoint

ERROR, TIMEOUT = "agent_error", "agent_timeout"
MAX_LEFT = 64
"""Cancelled calls of agents that may still be running."""


class OpenAIEnvironment:
    """Runs a user's agent, every episode with an endpoint of its own.

    The agent is `async def agent(base_url: str, api_key: str, prompt: str, answer: str) -> float | None`, or the same without `async`. It
    may also take `columns`, the example's other columns. It returns the episode's reward, or None if the configured scorer scores the
    episode. It runs in a thread of its own, so it may block. It sends requests with `openai.AsyncOpenAI(base_url=base_url,
    api_key=api_key)` or any other client; every model name means the policy.

    Args:
        agent: `package.module:function`.
        timeout_s: maximum run time of the agent, in seconds.
        style: as `environment.tools.style`.

    Raises:
        ConfigError: no such function.
    """

    def __init__(self, agent: str, *, timeout_s: float = 600.0, style: str = HERMES) -> None:
        self._function = plugins.load_function(agent, "environment.agent", forms="package.module:function")
        self._takes_columns = plugins.takes(self._function, "columns")
        self._timeout_s = timeout_s
        self._endpoint, self._threads = OpenAIEndpoint(style), _Threads()

    async def run(self, episode: Episode) -> Rewards:
        """See `Environment`.

        Raises:
            TrajectoryRejected: "agent_error", "agent_timeout", or what the agent raised with a reason of its own.
            UserError: too many agents have not ended after their timeouts.
        """
        episode.failure = self._threads.too_many()
        episode.check()
        session, url = await self._endpoint.open(episode)
        asked = episode.prompt
        function = partial(self._function, columns=asked.columns) if self._takes_columns else self._function
        call = partial(self._threads.call, function, url, session.key, asked.text, asked.answer)
        try:
            reward = await plugins.awaited(call, self._timeout_s, "the agent")
        except plugins.Overdue as error:
            raise TrajectoryRejected(TIMEOUT, str(error)) from error
        except Exception as error:
            episode.check()  # an agent raises if its requests fail; the cause of that failure is more informative
            if isinstance(error, TrajectoryRejected):
                raise
            raise TrajectoryRejected(ERROR, plugins.told(error)) from error
        finally:
            await self._endpoint.end(session)
        return cast(Rewards, reward)

    async def close(self) -> None:
        """Stop the endpoint."""
        await self._endpoint.close()


class _Threads:
    """Calls coroutine functions and plain functions, each call in a thread (and an event loop) of its own, so that it cannot block ours.

    A cancelled call ends by itself: its coroutine is cancelled, but a plain function cannot be. `MAX_LEFT` cancelled calls that do not
    end stop the run.
    """

    def __init__(self) -> None:
        self._left: list[threading.Thread] = []

    def too_many(self) -> UserError | None:
        """Return the error if too many cancelled calls have not ended; to be called before each call."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= MAX_LEFT:
            got, expected = f"{MAX_LEFT} calls still running after their timeout", "a function that ends when its requests fail"
            return UserError("environment.agent", got=got, expected=expected)
        return None

    async def call(self, function: Callable[..., object], *arguments: object) -> object:
        """Return the function's result, or raise its exception; RuntimeError in place of one that is no Exception."""
        call = _Call(function, arguments)
        thread = threading.Thread(target=call.run, name=f"agent {getattr(function, '__name__', '')}", daemon=True)
        thread.start()
        try:
            return await asyncio.wrap_future(call.result)
        except asyncio.CancelledError:
            call.cancel()
            self._left.append(thread)
            raise


class _Call:
    def __init__(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self._function, self._arguments = function, arguments
        self.result: Future[object] = Future()
        self.result.set_running_or_notify_cancel()  # whoever stops waiting calls `cancel`
        self._task: asyncio.Task[object] | None = None
        self._cancelled = False

    def run(self) -> None:
        """Run the function; called in the new thread."""
        try:
            awaits = inspect.iscoroutinefunction(self._function)
            self.result.set_result(asyncio.run(self._run()) if awaits else self._function(*self._arguments))
        except BaseException as error:  # noqa: BLE001  passed to the caller, in the caller's thread
            passes = isinstance(error, Exception) and not isinstance(error, StopIteration)  # which no future of asyncio takes
            self.result.set_exception(error if passes else RuntimeError(plugins.told(error)))

    def cancel(self) -> None:
        """Cancel the coroutine; called in the caller's thread."""
        self._cancelled = True  # before the look for the task, which looks for this after it is known
        if self._task is not None:
            # The loop may have just ended.
            with suppress(RuntimeError):
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _run(self) -> object:
        self._task = asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        return await self._function(*self._arguments)  # type: ignore[misc]
