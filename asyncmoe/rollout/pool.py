"""The engines together: which one gets a request, which one is gone, and the gate that holds requests back.

- A request goes to the engine with the fewest in flight, under the version the ledger gives that engine at that moment.
- While a weight update runs the gate is closed: a request that is already at an engine stands still there, a new one waits here, so
  it is never filed under a version that is about to change.
- An engine that ends or does not answer is *fenced*: killed with all it spawned, so it can never serve a mixed version. What it
  was generating fails with `TrajectoryRejected("engine_died")`; the producer starts those groups again. It is not
  restarted: weights travel in a group of fixed membership, so the next weight update is refused and the run ends there, to be
  resumed by the same command. `watch` raises as soon as no engine is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncmoe.errors import EngineError, TrajectoryRejected, WaitTimeout
from asyncmoe.rollout.engine_client import EngineClient, EngineLost, Generation, Sampling

log = logging.getLogger(__name__)
_WATCH_S = 0.5


class Server(Protocol):
    """What the pool needs of an `Engine`."""

    name: str
    tp: int
    ep: int
    rank_offset: int
    client: EngineClient

    @property
    def died(self) -> str | None: ...

    def kill(self) -> None: ...


@dataclass
class Member:
    """An engine and what the pool knows of it.

    Attributes:
        version: what the engine serves.
        in_flight: requests sent and not answered.
        fenced: why it takes no more requests, or None.
        busy_since: Unix seconds since which it has been generating and that is not recorded yet, or None.
    """

    engine: Server
    version: int = 0
    in_flight: int = 0
    fenced: str | None = None
    busy_since: float | None = None


@dataclass(frozen=True)
class Answer:
    """A generation and the version its prompt was filed under."""

    generation: Generation
    salt: int


class Pool:
    """All engines of a run.

    Attributes:
        generated_tokens: sampled by all engines so far.
        lost_tokens: those of them that were thrown away because a response started again.
        recomputed_tokens: of prefixes that were sent again because a response was cut short.

    Args:
        limit: requests in flight over all engines.
        timeout_s: how long one response may take.
        record: called with (engine, begin, end) in Unix seconds for every stretch in which an engine was generating.
    """

    def __init__(self, engines: Sequence[Server], limit: int, timeout_s: float, record: Callable[[str, float, float], None]) -> None:
        self.members = [Member(engine) for engine in engines]
        self.generated_tokens = self.lost_tokens = self.recomputed_tokens = 0
        self._slots = asyncio.Semaphore(limit)
        self._timeout_s, self._record = timeout_s, record
        self._gate = asyncio.Event()
        self._gate.set()

    @property
    def serving(self) -> list[Member]:
        """The engines that are not fenced."""
        return [member for member in self.members if member.fenced is None]

    @property
    def version(self) -> int:
        """The oldest version an engine serves."""
        return min((member.version for member in self.serving), default=0)

    async def generate(self, tokens: Sequence[int], sampling: Sampling, held: int = 0) -> Answer:
        """One response.

        Args:
            held: as for `EngineClient.generate`.

        Raises:
            TrajectoryRejected: "engine_died", "engine_error" or "engine_timeout".
            EngineError: no engine is left.
        """
        async with self._slots:
            await self._gate.wait()
            return await self._ask(self._least_loaded(), tokens, sampling, held)

    def close(self) -> None:
        """Close the gate; what is at the engines goes on."""
        self._gate.clear()

    def hold(self) -> None:
        """Close the gate. The time until `release` does not count as generating."""
        self._gate.clear()
        self.note_busy()
        for member in self.members:
            member.busy_since = None

    def release(self) -> None:
        """Open the gate; requests that stood still go on."""
        now = time.time()
        for member in self.members:
            member.busy_since = now if member.in_flight else None
        self._gate.set()

    def fence(self, member: Member, why: str) -> None:
        """Give no more requests to an engine, ever, and end it."""
        if member.fenced is not None:
            return
        member.fenced = member.engine.died or why
        log.error("%s is fenced: %s", member.engine.name, member.fenced)
        member.engine.kill()

    async def watch(self) -> None:
        """Fence engines whose process ends; never returns.

        Raises:
            EngineError: no engine is left.
        """
        while True:
            for member in self.serving:
                if (why := member.engine.died) is not None:
                    self.fence(member, why)
            self._any()
            await asyncio.sleep(_WATCH_S)

    def note_busy(self) -> None:
        """Record what engines have been generating until now, without waiting for them to fall idle."""
        now = time.time()
        for member in self.members:
            if member.busy_since is not None:
                self._record(member.engine.name, member.busy_since, now)
                member.busy_since = now

    async def _ask(self, member: Member, tokens: Sequence[int], sampling: Sampling, held: int) -> Answer:
        salt = member.version
        self._enter(member)
        try:
            generation = await member.engine.client.generate(tokens, sampling, str(salt), self._timeout_s, held)
        except EngineLost as error:
            self.fence(member, str(error))
            raise TrajectoryRejected("engine_died", str(error)) from error
        except EngineError as error:
            raise TrajectoryRejected("engine_error", str(error)) from error
        except WaitTimeout as error:
            raise TrajectoryRejected("engine_timeout", str(error)) from error
        finally:
            self._leave(member)
        self.generated_tokens += len(generation.tokens)
        return Answer(generation, salt)

    def _least_loaded(self) -> Member:
        return min(self._any(), key=lambda member: member.in_flight)

    def _any(self) -> list[Member]:
        serving = self.serving
        if not serving:
            reasons = "; ".join(f"{member.engine.name}: {member.fenced}" for member in self.members)
            raise EngineError(f"no engine is left: {reasons}")
        return serving

    def _enter(self, member: Member) -> None:
        if member.in_flight == 0:
            member.busy_since = time.time()
        member.in_flight += 1

    def _leave(self, member: Member) -> None:
        member.in_flight -= 1
        if member.in_flight == 0 and member.busy_since is not None:
            self._record(member.engine.name, member.busy_since, time.time())
            member.busy_since = None
