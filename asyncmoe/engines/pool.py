"""The engine pool: dispatches requests to engines, fences engines that fail, and holds requests back at the gate.

- A request goes to the engine that `scheduling.choose` selects. Its prefix is cached there under the version that the engine serves at
  that moment.
- The number of requests at the engines is limited; all other requests wait at the gate, in the order of `scheduling.Waiting`.
- The gate is closed during a weight update: a request already at an engine stays there and a new request waits here, so no prefix is
  cached under a version that is about to change.
- An engine that exits or falls silent (`asyncmoe.engines.liveness`) is *fenced*: killed with every process it spawned, so that it
  can never serve a mixed version. Its requests go to the remaining engines, which also receive the next version; a request that has lost
  several engines fails with `TrajectoryRejected("engine_died")`, and the producer restarts its group. Without an engine, requests wait for
  one to come back; `watch` raises as soon as none will. A connection that breaks off while its engine answers other requests makes the
  engine a suspect.
- An engine that joins waits for its first version. An engine that leaves takes no new requests and finishes its current ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from asyncmoe.config.rollout import Order
from asyncmoe.engines.engine import EngineHandle
from asyncmoe.engines.gate import Gate
from asyncmoe.engines.member import Member, RecordBusy
from asyncmoe.engines.scheduling import KEPT_CONVERSATIONS, PATIENCE, UNKNOWN, Lengths, Recent, ScheduledRequest, Waiting, choose
from asyncmoe.engines.standstill import Standstill
from asyncmoe.engines.types import ABORTED, EngineLost, Generation, Listener, ParsedCall, Sampling, Tokens
from asyncmoe.errors import EngineError, TrajectoryRejected, WaitTimeout

log = logging.getLogger(__name__)
_WATCH_S, _PROBE_S = 0.5, 5.0
_OTHERS = 2
"""Times that a request moves to another engine after losing its own: a request that kills engines must not reach them all."""
_BROKEN, _AGAIN_S = 8, 0.1
"""Times that a request is resent after its connection to a live engine broke, and seconds before the first resend; the wait doubles."""


@dataclass(frozen=True)
class PooledGeneration:
    """A generation and the version its prompt was cached under."""

    generation: Generation
    salt: int


class Gates(Protocol):
    """The gates of rollout workers, in front of the same engines."""

    async def close_gates(self) -> int:
        """Stop the workers from sending requests; return how many requests are in flight: above 0 if a worker does not answer."""

    def open_gates(self) -> None:
        """Let the workers send requests again, with the versions that the engines serve now."""

    def tell(self) -> None:
        """Tell the workers what has changed about the engines."""

    async def late(self) -> int:
        """Return how many workers have not acknowledged what they were told; `Member.elsewhere` counts requests of all other workers."""


class Pool:
    """All engines of a run.

    Attributes:
        generated_tokens: tokens sampled by all engines so far.
        lost_tokens: sampled tokens that were discarded because a response restarted.
        recomputed_tokens: prefix tokens that were sent again because a response was cut short.
        recalled_tokens: recorded tokens that unfinished episodes reused after a restart.
        lineage: lineage of the versions that arrive from now on: how often steps were trained again (`asyncmoe.queue.fold`).
        elsewhere: rollout workers that send requests to these engines; None: there are none.
        asleep: whether engines have no turn on their devices (`asyncmoe.occupancy`).
        returns: given the seconds since the last engine was lost, returns whether one will come back; initially always False.

    Args:
        limit: maximum number of requests in flight over all engines.
        timeout_s: maximum seconds for one response.
        record: called for every interval in which an engine was generating.
        order: as `rollout.order`.
        adapter: name of the adapter that all requests are sampled with.
        dp_ranks: groups of an engine's ranks, each with a cache of its own (`engines.dp_attention`).
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        limit: int,
        timeout_s: float,
        record: RecordBusy,
        *,
        order: Order = "fifo",
        adapter: str | None = None,
        dp_ranks: int = 1,
    ) -> None:
        self._adapter, self._dp_ranks = adapter, dp_ranks
        self.generated_tokens = self.lost_tokens = self.recomputed_tokens = self.recalled_tokens = self.lineage = 0
        self._timeout_s, self._record, self._standstill = timeout_s, record, Standstill()
        self.returns: Callable[[float], bool] = lambda _: False
        self.elsewhere: Gates | None = None
        self.asleep = False
        self._none_since: float | None = None
        self.members = [Member(engine) for engine in engines]
        self._lengths = Lengths()
        self._homes = Recent[tuple[str, int]](KEPT_CONVERSATIONS)  # the engine and its DP rank that last answered each conversation
        self._gate = Gate(limit, Waiting(order, PATIENCE * limit, self._lengths))

    @property
    def serving(self) -> list[Member]:
        """The engines that receive requests."""
        return [member for member in self.present if not (member.waiting or member.leaving)]

    @property
    def present(self) -> list[Member]:
        """The engines that are not fenced; new versions go to all of them except leaving engines."""
        return [member for member in self.members if member.fenced is None]

    @property
    def version(self) -> int:
        """The oldest version that a serving engine has; 0 without engines."""
        return min((member.version for member in self.serving), default=0)

    @property
    def awaited(self) -> bool:
        """Whether no engine is left, but one will come back."""
        if any(not member.leaving for member in self.present):
            self._none_since = None
            return False
        now = time.monotonic()
        since = self._none_since = now if self._none_since is None or self.asleep else self._none_since  # asleep, none may start
        return self.returns(now - since)

    async def generate(
        self,
        tokens: Tokens,
        sampling: Sampling,
        routed: int = 0,
        request: ScheduledRequest = UNKNOWN,
        listener: Listener | None = None,
    ) -> PooledGeneration:
        """Generate one response: ask engines until one answers, so that no lost engine or standstill of this process costs an episode its
        earlier answers.

        Losing the last engine does not cost them either: the request waits for an engine that comes back, or the run ends and, once
        resumed, continues the unfinished group from those answers; a group that starts over would lose them.

        Args:
            routed, listener: as for `Engine.generate`.
            request: decides when the prompt is sent, and to which engine.

        Raises:
            TrajectoryRejected: "engine_died", "engine_error" or "engine_timeout".
            EngineError: no engine is left.
        """
        lost = broken = 0
        while True:
            began, member = time.monotonic(), None
            try:
                async with self._gate.place(request):
                    await self._some()
                    member = self._choose(request)
                    return await self._ask(member, tokens, sampling, routed, request, listener)
            except TrajectoryRejected as error:
                stood = error.reason == "engine_timeout" and self._standstill.since(began)
                live = listener is not None and listener.live  # what it has heard cannot be taken back
                if live or not (stood or error.reason == "engine_died"):
                    raise
                gone = member is not None and member.fenced is not None
                lost, broken = lost + gone, broken + (not gone)
                if lost > _OTHERS or broken > _BROKEN:
                    raise
                log.warning("a request is sent again: %s", error)
                if not gone:
                    await asyncio.sleep(_AGAIN_S * 2 ** (broken - 1))
            if listener is not None:
                listener.forget()
            request = replace(request, continues=True)  # it has waited before

    async def parse_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> tuple[ParsedCall, ...]:
        """Return the tool calls in a response; any engine can parse them. See `Engine.parse_calls`. Raises as `generate`."""
        await self._some()
        member = min(self.serving, key=lambda member: (member.suspect, member.in_flight))
        async with self._asking(member):
            return await member.engine.client.parse_calls(text, parser, tools)

    def join(self, engine: EngineHandle) -> Member:
        """Add an engine; it receives requests after its first version."""
        member = Member(engine, waiting=True)
        self.members.append(member)
        return member

    def remove(self, member: Member) -> None:
        """Remove an engine that has left."""
        member.idle(self._record)
        self.members.remove(member)

    def close(self) -> None:
        """Close the gate; requests at the engines continue."""
        self._gate.close()

    def hold(self) -> None:
        """Close the gate. The time until `release` does not count as generation."""
        self._gate.close()
        for member in self.members:
            member.idle(self._record)

    def release(self) -> None:
        """Open the gate; engines with requests count as generating again. The gate stays closed while engines are asleep."""
        if self.asleep:
            return
        for member in self.members:
            member.generates()
        self._gate.open()
        if self.elsewhere is not None:
            self.elsewhere.open_gates()

    async def held(self) -> int:
        """Return the number of requests in flight at engines, once no rollout worker sends any more; call it after `close` or `hold`."""
        here = sum(member.in_flight for member in self.serving)
        return here if self.elsewhere is None else here + await self.elsewhere.close_gates()

    def fence(self, member: Member, why: str) -> None:
        """Kill an engine and never send it a request again."""
        if member.fenced is not None:
            return
        member.fenced = member.engine.died or why
        log.error("%s is fenced: %s", member.engine.name, member.fenced)
        member.engine.kill(member.fenced)

    async def watch(self) -> None:
        """Fence every engine whose process ends; never returns.

        Raises:
            EngineError: no engine is left, and none will come back.
        """
        while True:
            self.look()
            self.fence_dead()
            self._any()
            await asyncio.sleep(_WATCH_S)

    def look(self) -> None:
        """Notice standstills of this process, which let requests time out through no fault of an engine."""
        self._standstill.look()

    def fence_dead(self) -> None:
        """Fence engines whose process has ended."""
        for member in self.present:
            if (why := member.engine.died) is not None:
                self.fence(member, why)

    async def silent(self, member: Member) -> bool:
        """Return whether an engine shows no sign of generating; fence it if nothing listens at its address any more.

        The process that would report the server's end may be gone too. The loss of a whole machine shows only in missing heartbeats.
        """
        if self.asleep or member.fenced is not None or await member.engine.client.alive(_PROBE_S):
            return False
        with suppress(TrajectoryRejected, TimeoutError):
            async with asyncio.timeout(_PROBE_S), self._asking(member):
                await member.engine.client.weights_version()
        return member.fenced is None

    def note_busy(self) -> None:
        """Record the generation time of busy engines up to now, without waiting until they are idle."""
        for member in self.members:
            member.note_busy(self._record)

    async def _some(self) -> None:
        """Wait until an engine serves; all engines may be waiting for their first version, or restarting.

        Raises:
            EngineError: no engine is left, and none will come back.
            TrajectoryRejected: "engine_timeout".
        """
        until = time.monotonic() + self._timeout_s
        while not self.serving:
            self._any()
            if self.awaited:
                until = time.monotonic() + self._timeout_s
            if time.monotonic() > until:
                raise TrajectoryRejected("engine_timeout", f"no engine received a version within {self._timeout_s:g} s")
            await asyncio.sleep(_WATCH_S)

    async def _ask(
        self, member: Member, tokens: Tokens, sampling: Sampling, routed: int, request: ScheduledRequest, listener: Listener | None
    ) -> PooledGeneration:
        home, last = self._homes.get(request.conversation, ("", None))
        loads = {rank: member.by_dp_rank[rank] for rank in range(self._dp_ranks)}
        rank = choose(loads, last if home == member.engine.name else None)
        member.entered(rank)
        try:
            async with self._asking(member):
                salt, client, where = member.version, member.engine.client, rank if self._dp_ranks > 1 else None
                generation = await client.generate(tokens, sampling, member.salt, self._timeout_s, routed, self._adapter, listener, where)
        finally:
            member.left(self._record, rank)
        member.heard, member.suspect = time.monotonic(), False
        self.generated_tokens += len(generation.tokens)
        if request.conversation:
            self._homes[request.conversation] = member.engine.name, rank
        if generation.finish != ABORTED and not (request.partial and generation.finish == "length"):  # else the response goes on
            self._lengths.note(request.prompt, request.sampled + len(generation.tokens))
        return PooledGeneration(generation, salt)

    @asynccontextmanager
    async def _asking(self, member: Member) -> AsyncIterator[None]:
        """Reject the trajectory if the engine fails within the block; fence an engine that is gone, and suspect one that may be alive."""
        try:
            yield
        except EngineLost as error:
            if member.fenced is None and member.engine.died is None and await member.engine.client.ready():
                member.suspect = True
            else:
                self.fence(member, str(error))
            raise TrajectoryRejected("engine_died", str(error)) from error
        except EngineError as error:
            raise TrajectoryRejected("engine_error", str(error)) from error
        except WaitTimeout as error:
            member.suspect = True
            raise TrajectoryRejected("engine_timeout", str(error)) from error

    def _choose(self, request: ScheduledRequest) -> Member:
        # A silent engine has few requests, because they time out, so it would be the first choice.
        serving = [member for member in self.serving if not member.suspect] or self.serving
        members = {member.engine.name: member for member in serving}
        loads = {name: member.in_flight for name, member in members.items()}
        return members[choose(loads, self._homes.get(request.conversation, ("", 0))[0])]

    def _any(self) -> None:
        """Raise EngineError if no engine is left and none will come back."""
        if not (any(not member.leaving for member in self.present) or self.awaited):
            reasons = "; ".join(f"{member.engine.name}: {member.fenced or 'it is leaving'}" for member in self.members)
            raise EngineError(f"no engine is left: {reasons or 'all have left'}")
