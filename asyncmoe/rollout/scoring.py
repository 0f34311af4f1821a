"""Scores of responses, computed beside generation and never in its way.

A scorer is `f(prompt: str, response: str, answer: str) -> float`. Plain functions run in worker processes
(`asyncmoe.rollout.score_worker`), because they may hang or hold the interpreter, and math_verify works on a main thread only; coroutine
functions run in the controller's loop. What raises, returns no finite number or takes too long rejects the response under a
reason of its own. It is never a reward of zero.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, cast

from asyncmoe.config.generation import TaskSection
from asyncmoe.errors import ConfigError, TrajectoryRejected, WaitTimeout

ERROR, NAN, TIMEOUT = "scorer_error", "scorer_nan", "scorer_timeout"
MATH_VERIFY = "asyncmoe.rollout.math_scorer:score"
_WORKERS = min(4, os.cpu_count() or 1)
_START_S = 60.0


class Scorer(Protocol):
    """Turns a response into a reward."""

    async def score(self, prompt: str, response: str, answer: str) -> float:
        """A finite reward.

        Raises:
            TrajectoryRejected: "scorer_error", "scorer_nan" or "scorer_timeout".
        """
        ...

    async def close(self) -> None:
        """End what it started."""
        ...


def load(section: TaskSection) -> Scorer:
    """The scorer a configuration names.

    Raises:
        ConfigError: no such function.
    """
    kind = section.scorer
    if kind == "auto":
        kind = "exact" if section.kind == "arithmetic" else "math_verify"
    if kind == "exact":
        return Exact()
    target = MATH_VERIFY if kind == "math_verify" else kind
    function = find(target)
    if inspect.iscoroutinefunction(function):
        return InLoop(function, section.scorer_timeout_s)
    return InWorkers(target, section.scorer_timeout_s)


def find(target: str) -> Callable[..., object]:
    """Import `package.module:function`.

    Raises:
        ConfigError: it cannot be imported or called.
    """
    module, _, name = target.partition(":")
    expected = "auto, exact, math_verify or package.module:function"
    if not module or not name:
        raise ConfigError("task.scorer", got=repr(target), expected=expected)
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            "task.scorer", got=f"{target}: {type(error).__name__}: {error}", expected="a function that can be imported"
        ) from error
    if not callable(function):
        raise ConfigError("task.scorer", got=f"{target}, a {type(function).__name__}", expected="a function")
    return cast(Callable[..., object], function)


class Exact:
    """1 when the response is the answer, up to white space around it, else 0."""

    async def score(self, prompt: str, response: str, answer: str) -> float:
        """See `Scorer`."""
        return float(response.strip() == answer)

    async def close(self) -> None:
        """See `Scorer`."""


class InLoop:
    """A coroutine function, all calls of which run concurrently."""

    def __init__(self, function: Callable[..., object], timeout_s: float) -> None:
        self._function = cast(Callable[[str, str, str], Awaitable[object]], function)
        self._timeout_s = timeout_s

    async def score(self, prompt: str, response: str, answer: str) -> float:
        """See `Scorer`."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                value = await self._function(prompt, response, answer)
        except Exception as error:
            # A TimeoutError may as well be the function's own.
            if deadline.expired():
                raise TrajectoryRejected(TIMEOUT, f"the scorer took longer than {self._timeout_s:g} s") from error
            raise TrajectoryRejected(ERROR, f"{type(error).__name__}: {error}") from error
        return checked(value)

    async def close(self) -> None:
        """See `Scorer`."""


class InWorkers:
    """A plain function in a few worker processes. One that takes too long is killed and replaced."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._workers = [_Worker(target) for _ in range(_WORKERS)]
        # Last in, first out: a light load stays with one process.
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._asking: set[asyncio.Task[object]] = set()

    async def score(self, prompt: str, response: str, answer: str) -> float:
        """See `Scorer`."""
        worker = await self._idle.get()
        asking = asyncio.create_task(self._ask(worker, (prompt, response, answer)))
        self._asking.add(asking)
        asking.add_done_callback(self._answered)
        # Whoever asked may lose interest; the process is better left to finish than started anew.
        return checked(await asyncio.shield(asking))

    async def close(self) -> None:
        """See `Scorer`."""
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for worker in self._workers:
            await worker.end()

    async def _ask(self, worker: _Worker, arguments: tuple[str, str, str]) -> object:
        try:
            return await worker.ask(arguments, self._timeout_s)
        finally:
            self._idle.put_nowait(worker)

    def _answered(self, asking: asyncio.Task[object]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            # Nobody may be left to hear it.
            asking.exception()


class _Worker:
    """One process of `score_worker`; started when first needed."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, arguments: tuple[str, str, str], timeout_s: float) -> object:
        """What the function returned.

        Raises:
            TrajectoryRejected: it raised, took longer than `timeout_s`, or ended its process.
        """
        try:
            if self._process is None:
                self._process = await self._start()
            answer = await self._exchange(self._process, json.dumps(arguments), timeout_s)
        except BaseException:
            # Its next answer would be taken for that of another question.
            await self.end()
            raise
        if "error" in answer:
            raise TrajectoryRejected(ERROR, str(answer["error"]))
        return answer["value"]

    async def end(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "asyncmoe.rollout.score_worker", self._target)
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._process = process
        try:
            await self._exchange(process, None, _START_S)
        except TrajectoryRejected as error:
            raise WaitTimeout("a scorer's process", f"start: {error}", _START_S) from error
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, line: str | None, timeout_s: float) -> dict[str, object]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                if line is not None:
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError as error:
            raise TrajectoryRejected(TIMEOUT, f"the scorer took longer than {timeout_s:g} s") from error
        except ConnectionError as error:
            raise TrajectoryRejected(ERROR, f"the scorer's process has ended: {error}") from error
        if not answer:
            raise TrajectoryRejected(ERROR, f"the scorer ended its process with status {await process.wait()}")
        return cast(dict[str, object], json.loads(answer))


def checked(value: object) -> float:
    """A score as a finite float.

    Raises:
        TrajectoryRejected: it is no number, or not finite.
    """
    try:
        score = float(number(value))
    except (TypeError, OverflowError) as error:
        raise TrajectoryRejected(ERROR, f"{type(error).__name__}: {error}") from error
    if not math.isfinite(score):
        raise TrajectoryRejected(NAN, f"the scorer returned {score}")
    return score


def number(value: object) -> int | float:
    """What a scorer returned as a Python number; scalars of NumPy and torch are taken.

    Raises:
        TypeError: it is none.
    """
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if not isinstance(plain, int | float):
        raise TypeError(f"the scorer returned {type(value).__name__}, not a number")
    return plain
