"""The engines together: which one gets a request, which one is gone, and the gate that holds requests back.

- A request goes to the engine that `scheduling.choose` names, under the version the ledger gives that engine at that moment.
- At most so many requests are at the engines; the others wait at the gate, in the order of `scheduling.Waiting`.
- While a weight update runs the gate is closed: a request that is already at an engine stands still there, a new one waits here, so
  it is never filed under a version that is about to change.
- An engine that ends or does not answer is *fenced*: killed with all it spawned, so it can never serve a mixed version. What it
  was generating fails with `TrajectoryRejected("engine_died")`; the producer starts those groups again, on the engines that are left.
  The next version goes to those. `watch` raises as soon as no engine is left.
- An engine that joins waits for its first version, and one that leaves takes no new requests and finishes what it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from asyncmoe.config.generation import Balance, Order
from asyncmoe.errors import EngineError, TrajectoryRejected, WaitTimeout
from asyncmoe.rollout.engines.adapter_slots import ServedBy, TwoSlots, attributed
from asyncmoe.rollout.engines.engine_client import ABORTED, EngineClient, EngineLost, Generation, Sampling
from asyncmoe.rollout.engines.gate import Gate
from asyncmoe.rollout.engines.scheduling import UNKNOWN, Homes, Lengths, ScheduledRequest, Waiting, choose

log = logging.getLogger(__name__)
_WATCH_S = 0.5
_PATIENCE = 4
"""A request is overtaken at most this many times `limit` times: the order is kept until waiting has lasted several responses."""


class EngineHandle(Protocol):
    """What the pool needs of an `Engine`."""

    name: str
    tp: int
    ep: int
    host: str
    client: EngineClient

    @property
    def died(self) -> str | None: ...

    def kill(self) -> None: ...


@dataclass(eq=False)
class Member:
    """An engine and what the pool knows of it.

    Attributes:
        adapter: that requests name.
        slots: its adapters, where every version is one.
        version: what the engine serves.
        in_flight: requests sent and not answered.
        fenced: why it takes no more requests, or None.
        waiting: it has joined and not yet got a version.
        leaving: it finishes what it has.
        busy_since: Unix seconds since which it has been generating and that is not recorded yet, or None.
    """

    engine: EngineHandle
    adapter: str | None = None
    slots: TwoSlots | None = None
    version: int = 0
    in_flight: int = 0
    fenced: str | None = None
    waiting: bool = False
    leaving: bool = False
    busy_since: float | None = None

    def serving(self) -> AbstractContextManager[ServedBy]:
        """What a request is sampled by, for the time of the request."""
        return nullcontext(ServedBy(self.version, self.adapter)) if self.slots is None else self.slots.use()


@dataclass(frozen=True)
class PooledGeneration:
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
        balance, slack, order: as `rollout.balance`, `affinity_slack` and `order`.
        adapter: name of the one that all requests are sampled with.
        slots: every version is an adapter of its own instead.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        limit: int,
        timeout_s: float,
        record: Callable[[str, float, float], None],
        *,
        balance: Balance = "least_loaded",
        slack: int = 0,
        order: Order = "fifo",
        adapter: str | None = None,
        slots: bool = False,
    ) -> None:
        self._adapter, self._has_slots = adapter, slots
        self.generated_tokens = self.lost_tokens = self.recomputed_tokens = 0
        self._timeout_s, self._record = timeout_s, record
        self.members = [self._member(engine) for engine in engines]
        self._balance, self._slack = balance, slack
        self._lengths, self._homes = Lengths(), Homes()
        self._gate = Gate(limit, Waiting(order, _PATIENCE * limit, self._lengths))

    @property
    def serving(self) -> list[Member]:
        """The engines that requests go to."""
        return [member for member in self.present if not (member.waiting or member.leaving)]

    @property
    def present(self) -> list[Member]:
        """The engines that are not fenced; those that new versions go to, unless they are about to leave."""
        return [member for member in self.members if member.fenced is None]

    @property
    def version(self) -> int:
        """The oldest version an engine serves."""
        return min((member.version for member in self.serving), default=0)

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, held: int = 0, request: ScheduledRequest = UNKNOWN
    ) -> PooledGeneration:
        """One response.

        Args:
            held: as for `EngineClient.generate`.
            request: decides when it goes, and to which engine.

        Raises:
            TrajectoryRejected: "engine_died", "engine_error" or "engine_timeout".
            EngineError: no engine is left.
        """
        async with self._gate.place(request):
            await self._some()
            member = self._choose(request)
            answer = await self._ask(member, tokens, sampling, held)
        self._homes.note(request.conversation, member.engine.name)
        if answer.generation.finish != ABORTED:
            self._lengths.note(request.prompt, request.sampled + len(answer.generation.tokens))
        return answer

    def join(self, engine: EngineHandle) -> Member:
        """Take in an engine; requests go to it after its first version."""
        member = self._member(engine)
        member.waiting = True
        self.members.append(member)
        return member

    def remove(self, member: Member) -> None:
        """Forget an engine that has left."""
        self._leave_idle(member)
        self.members.remove(member)

    def close(self) -> None:
        """Close the gate; what is at the engines goes on."""
        self._gate.close()

    def hold(self) -> None:
        """Close the gate. The time until `release` does not count as generating."""
        self._gate.close()
        self.note_busy()
        for member in self.members:
            member.busy_since = None

    def release(self) -> None:
        """Open the gate; requests that stood still go on."""
        now = time.time()
        for member in self.members:
            member.busy_since = now if member.in_flight else None
        self._gate.open()

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
            self.fence_dead()
            self._any()
            await asyncio.sleep(_WATCH_S)

    def fence_dead(self) -> None:
        """Fence engines whose process has ended."""
        for member in self.present:
            if (why := member.engine.died) is not None:
                self.fence(member, why)

    def note_busy(self) -> None:
        """Record what engines have been generating until now, without waiting for them to fall idle."""
        now = time.time()
        for member in self.members:
            if member.busy_since is not None:
                self._record(member.engine.name, member.busy_since, now)
                member.busy_since = now

    def _member(self, engine: EngineHandle) -> Member:
        return Member(engine, self._adapter, TwoSlots(engine.client, self._timeout_s) if self._has_slots else None)

    async def _some(self) -> None:
        """Return when requests can go somewhere: all engines may be waiting for their first version.

        Raises:
            EngineError: no engine is left.
            TrajectoryRejected: "engine_timeout".
        """
        until = time.monotonic() + self._timeout_s
        while not self.serving:
            self._any()
            if time.monotonic() > until:
                raise TrajectoryRejected("engine_timeout", f"no engine has got a version within {self._timeout_s:g} s")
            await asyncio.sleep(_WATCH_S)

    async def _ask(self, member: Member, tokens: Sequence[int], sampling: Sampling, held: int) -> PooledGeneration:
        self._enter(member)
        try:
            with member.serving() as serving:
                salt = serving.version
                generation = await member.engine.client.generate(tokens, sampling, str(salt), self._timeout_s, held, serving.adapter)
            if member.slots is not None:
                generation = attributed(generation, serving)
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
        return PooledGeneration(generation, salt)

    def _choose(self, request: ScheduledRequest) -> Member:
        members = {member.engine.name: member for member in self.serving}
        loads = {name: member.in_flight for name, member in members.items()}
        return members[choose(loads, request.prompt, self._balance, self._slack, self._homes.of(request.conversation))]

    def _any(self) -> None:
        """Raises EngineError when none is left."""
        if not any(not member.leaving for member in self.present):
            reasons = "; ".join(f"{member.engine.name}: {member.fenced or 'it is leaving'}" for member in self.members)
            raise EngineError(f"no engine is left: {reasons or 'all have left'}")

    def _enter(self, member: Member) -> None:
        if member.in_flight == 0:
            member.busy_since = time.time()
        member.in_flight += 1

    def _leave(self, member: Member) -> None:
        member.in_flight -= 1
        if member.in_flight == 0:
            self._leave_idle(member)

    def _leave_idle(self, member: Member) -> None:
        if member.busy_since is not None:
            self._record(member.engine.name, member.busy_since, time.time())
            member.busy_since = None
