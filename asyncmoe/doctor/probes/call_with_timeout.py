"""Timeouts for calls that may hang, such as on an unresponsive file system or name server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from asyncmoe.errors import WaitTimeout

T = TypeVar("T")


class Later(Generic[T]):
    """Runs `work` in a daemon thread, which does not prevent the process from exiting."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, whom: str, what: str, seconds: float) -> T:
        """Return the result of `work`, or raise its exception.

        Raises:
            WaitTimeout: `work` did not finish in time.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise WaitTimeout(whom, what, seconds)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001  re-raised by `result`
            self._error = error
