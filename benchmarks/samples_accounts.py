"""Adds up the CPU time of the calls that keep samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any


class Accounts:
    """Adds up the CPU time that threads spend within the calls that keep samples."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count these calls within the block."""
        from asyncmoe.rollout.samples import Samples
        from asyncmoe.trainer.samples import BatchSamples, TrainerSamples

        counted = [(Samples, "opened"), (Samples, "ended"), (TrainerSamples, "of"), (TrainerSamples, "write")]
        before: list[tuple[type, str, Any]] = [(kind, name, getattr(kind, name)) for kind, name in counted]
        before += [(Samples, "write", Samples.write), (BatchSamples, "observer", BatchSamples.observer)]
        for kind, name, function in before[: len(counted)]:
            setattr(kind, name, self._plain(function))
        write, observer = Samples.write, BatchSamples.observer

        async def written(*arguments: Any) -> None:
            await _Stepped(self, write(*arguments))

        setattr(Samples, "write", written)  # noqa: B010  mypy refuses a plain assignment
        observing = lambda batch, members: self._plain(observer(batch, members))  # noqa: E731
        setattr(BatchSamples, "observer", observing)  # noqa: B010
        try:
            yield
        finally:
            for kind, name, function in before:
                setattr(kind, name, function)

    def _plain(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


class _Stepped:
    """A coroutine of which only the time it runs is counted, not that in which it waits."""

    def __init__(self, accounts: Accounts, coroutine: Coroutine[Any, Any, None]) -> None:
        self._accounts, self._coroutine = accounts, coroutine

    def __await__(self) -> Generator[Any, Any, None]:
        while True:
            begin = time.thread_time()
            try:
                waited = self._coroutine.send(None)
            except StopIteration:
                return
            finally:
                self._accounts.seconds += time.thread_time() - begin
            yield waited
