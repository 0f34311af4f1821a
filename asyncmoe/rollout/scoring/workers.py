"""Run a plain function or class in processes of its own: a user's code may hang or hold the interpreter; math_verify needs CPU time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.async_tasks import begun, cancelled
from asyncmoe.rollout.processes import Broken, Processes
from asyncmoe.rollout.scoring import plugin
from asyncmoe.rollout.scoring.plain_answer import plain
from asyncmoe.rollout.scoring.types import ERROR, GARBAGE, SHOWN, TIMEOUT, Sample, ScorerRaised, reason_of


class InWorkers:
    """See `Judge`.

    Args:
        target: "package.module:name", imported in each process.
        options: keyword arguments of a class, which each process instantiates.
        conversation: whether the target needs a sample's tokens.
        timeout_s: limit for one call, process startup excluded.
        width: number of processes.
    """

    def __init__(self, target: str, options: Mapping[str, object], conversation: bool, timeout_s: float, width: int) -> None:
        self._left_out = set() if conversation else {"tokens", "sampled"}
        self._timeout_s, self._free = timeout_s, asyncio.Semaphore(width)
        self._asking: set[asyncio.Task[dict[str, Any]]] = set()
        given = {"target": target, "options": options}
        self._processes = Processes(f"{__name__}:serve", given, "the scorer's process", "scoring.scorer")

    async def call(self, sample: Sample) -> object:
        """See `Judge`.

        Raises:
            AsyncmoeError: the process does not start.
        """
        told = {key: value for key, value in vars(sample).items() if key not in self._left_out} | {"columns": dict(sample.columns)}
        asking = begun(self._ask(told), self._asking)
        asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # a cancelled caller retrieves no error
        # If the caller is cancelled, letting the process finish is cheaper than restarting it.
        answer = await asyncio.shield(asking)
        if "raised" in answer:
            raise ScorerRaised(answer["failed"], **answer["raised"])
        if "failed" in answer:
            raise TrajectoryRejected(answer["failed"], answer["detail"])
        return answer["value"]

    async def close(self) -> None:
        """See `Judge`."""
        await cancelled(self._asking)
        await self._processes.close()

    async def _ask(self, told: Mapping[str, object]) -> dict[str, Any]:
        try:
            async with self._free:
                return cast(dict[str, Any], await self._processes.ask(told, self._timeout_s))
        except TimeoutError as error:
            raise TrajectoryRejected(TIMEOUT, f"the scorer took longer than {self._timeout_s:g} s") from error
        except Broken as broken:
            raise TrajectoryRejected(GARBAGE if broken.flood else ERROR, str(broken)) from broken


@contextmanager
def serve(target: str, options: Mapping[str, object]) -> Iterator[Callable[[Mapping[str, object]], object]]:
    """Answer samples in a process: {"value": as `asyncmoe.rollout.scoring.plain_answer.plain` returns it}, {"failed": reason, "detail":
    text}, or, if the target raised, {"failed": reason, "raised": arguments of `ScorerRaised`}. See `asyncmoe.rollout.process_worker`."""
    found = plugin.find(target)
    ask, made = found.ask(options)

    def answer(told: Mapping[str, object]) -> dict[str, object]:
        try:
            return {"value": plain(ask(Sample(**told)))}  # type: ignore[arg-type]
        except TrajectoryRejected as rejected:
            return {"failed": rejected.reason, "detail": str(rejected).removeprefix(f"{rejected.reason}: ")[:SHOWN]}
        except BaseException as error:  # noqa: BLE001  the rollout worker receives every error of user code
            return {"failed": reason_of(error), "raised": plugin.raised_by(error, found.function)}

    yield answer
    asyncio.run(plugin.close(made))
