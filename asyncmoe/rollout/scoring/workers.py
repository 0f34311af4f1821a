"""A plain function or class in worker processes, because a user's may hang or hold the interpreter lock, and math_verify computes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from asyncmoe.errors import AsyncmoeError, ConfigError, TrajectoryRejected, WaitTimeout
from asyncmoe.rollout import reaped
from asyncmoe.rollout.scoring.raised import Raised, ScorerRaised
from asyncmoe.rollout.scoring.types import ERROR, GARBAGE, TIMEOUT, Sample

_START_S = 60.0
_CLOSE_S = 5.0
_LINE_BYTES = 1 << 20
"""Maximum length of an answer."""


class InWorkers:
    """See `Judge`. Starts each process when first needed; kills and replaces a process that times out.

    Args:
        target: "package.module:name", imported in each process.
        options: keyword arguments of a class, which each process instantiates.
        conversation: whether the target needs a sample's tokens.
        timeout_s: limit for one call, process startup excluded.
        width: number of processes.
    """

    def __init__(self, target: str, options: Mapping[str, object], conversation: bool, timeout_s: float, width: int) -> None:
        self.width: int | None = width
        self._conversation, self._timeout_s = conversation, timeout_s
        self._workers = [_Worker(target, options) for _ in range(width)]
        # Last in, first out: a light load uses only one process.
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._asking: set[asyncio.Task[object]] = set()

    async def call(self, sample: Sample) -> object:
        """See `Judge`.

        Raises:
            AsyncmoeError: the process does not start.
        """
        worker = await self._idle.get()
        asking = asyncio.create_task(self._ask(worker, self._told(sample)))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # a cancelled caller no longer retrieves it
        # If the caller is cancelled, letting the process finish is cheaper than restarting it.
        return await asyncio.shield(asking)

    async def close(self) -> None:
        """See `Judge`."""
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _told(self, sample: Sample) -> object:
        told: dict[str, object] = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer, "agent": sample.agent}
        told["columns"] = dict(sample.columns)
        if self._conversation:
            told |= {"tokens": sample.tokens, "sampled": sample.sampled}
        return told

    async def _ask(self, worker: _Worker, told: object) -> object:
        try:
            return await worker.ask(told, self._timeout_s)
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """One process that runs `asyncmoe.rollout.scoring.worker`."""

    def __init__(self, target: str, options: Mapping[str, object]) -> None:
        self._target, self._options = target, options
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, told: object, timeout_s: float) -> object:
        """Send a sample and return the answer.

        Raises:
            TrajectoryRejected: the target raised, returned an invalid score, took longer than `timeout_s`, or ended its process.
        """
        try:
            if self._process is None:
                self._process = await self._start()
            answer = await self._exchange(self._process, told, timeout_s)
        except BaseException:
            # A late answer would be taken for the answer to the next sample.
            await self.end()
            raise
        if "raised" in answer:
            raise ScorerRaised(answer["failed"], Raised(**answer["raised"]))
        if "failed" in answer:
            raise TrajectoryRejected(answer["failed"], answer["detail"])
        return answer["value"]

    async def close(self) -> None:
        """Let the process close the target's object, then kill it."""
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _CLOSE_S)
        await self.end()

    async def end(self) -> None:
        """Kill the process, and all that it has started."""
        process, self._process = self._process, None
        if process is not None:
            await reaped.end(process, "a scorer's process")

    async def _start(self) -> asyncio.subprocess.Process:
        process = await reaped.start((sys.executable, "-m", "asyncmoe.rollout.scoring.worker"), _LINE_BYTES)
        self._process = process
        wanted = {"target": self._target, "options": self._options}
        try:
            answer = await self._exchange(process, wanted, _START_S)
        except TrajectoryRejected as error:
            if error.reason == TIMEOUT:
                raise WaitTimeout("a scorer's process", f"start with {self._target}", _START_S) from error
            raise AsyncmoeError(f"a scorer's process did not start with {self._target}: {error}") from error
        if "unusable" in answer:
            raise ConfigError("scoring.scorer", got=answer["unusable"], expected="a scorer that loads in a separate process")
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, told: object, timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return cast(dict[str, Any], await reaped.exchange(process, told))
        except TimeoutError as error:
            raise TrajectoryRejected(TIMEOUT, f"the scorer took longer than {timeout_s:g} s") from error
        except reaped.Broken as error:
            raise TrajectoryRejected(GARBAGE if error.flood else ERROR, f"the scorer's process {error}") from error
