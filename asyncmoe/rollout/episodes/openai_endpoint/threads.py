"""Runs a user's function in a thread of its own, so that it can never block the controller's event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from asyncmoe import plugins
from asyncmoe.errors import UserError

MAX_LEFT = 64


class Threads:
    """Calls coroutine functions and plain functions, each call in a thread (and an event loop) of its own.

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
