"""Runs a user's function in a thread of its own, so that it can never block the controller's event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress

from asyncmoe.errors import UserError

MAX_LEFT = 64


class Threads:
    """Calls coroutine functions and plain functions, each call in a thread (and an event loop) of its own.

    A cancelled call ends by itself: its coroutine is cancelled, but a plain function cannot be. `MAX_LEFT` cancelled calls that do not
    end stop the run.
    """

    def __init__(self) -> None:
        self._left: list[threading.Thread] = []

    def check(self) -> None:
        """Check the number of cancelled calls that still run; to be called before each call.

        Raises:
            UserError: too many cancelled calls have not ended.
        """
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= MAX_LEFT:
            got, expected = f"{MAX_LEFT} calls still running after their timeout", "a function that ends when its requests fail"
            raise UserError("environment.agent", got=got, expected=expected)

    async def call(self, function: Callable[..., object], *arguments: object) -> object:
        """Return the function's result, or raise its exception."""
        call = _Call(function, arguments)
        thread = threading.Thread(target=call.run, name=f"agent {getattr(function, '__name__', '')}", daemon=True)
        thread.start()
        try:
            return await call.result
        except asyncio.CancelledError:
            call.cancel()
            self._left.append(thread)
            raise


class _Call:
    def __init__(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._home = asyncio.get_running_loop()
        self.result: asyncio.Future[object] = self._home.create_future()
        self._lock = threading.Lock()
        self._task: asyncio.Task[object] | None = None
        self._cancelled = False

    def run(self) -> None:
        """Run the function; called in the new thread."""
        try:
            if inspect.iscoroutinefunction(self._function):
                value: object = asyncio.run(self._run())
            else:
                value = self._function(*self._arguments)
        except BaseException as error:  # noqa: BLE001  passed to the caller, in the caller's thread
            self._tell(None, error)
        else:
            self._tell(value, None)

    def cancel(self) -> None:
        """Cancel the coroutine; called in the caller's thread."""
        with self._lock:
            self._cancelled = True
            if self._task is not None:
                # The loop may have just ended.
                with suppress(RuntimeError):
                    self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _run(self) -> object:
        with self._lock:
            if self._cancelled:
                raise asyncio.CancelledError
            self._task = asyncio.current_task()
        return await self._function(*self._arguments)  # type: ignore[misc]

    def _tell(self, value: object, error: BaseException | None) -> None:
        # The caller's loop may have ended before this call.
        with suppress(RuntimeError):
            self._home.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: object, error: BaseException | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        elif isinstance(error, Exception):
            self.result.set_exception(error)
        else:
            self.result.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
