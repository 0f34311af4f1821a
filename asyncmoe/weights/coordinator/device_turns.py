"""The controller's end of devices in turn (`asyncmoe.occupancy`): has engines release and take memory as the trainer waits for its turn.

The turn passes on once every engine holds what the next state allows, or is fenced and its processes are gone. docs/guides/colocated.md
lists the limits of each state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from asyncmoe.config.devices import none_here
from asyncmoe.engines.member import Member
from asyncmoe.engines.types import MemoryTag
from asyncmoe.errors import ProtocolError, WaitTimeout, WeightSyncError
from asyncmoe.occupancy import ENGINE, HOLDS, MAY_START, DeviceTurn, Event, Held, MemoryPart, after, step
from asyncmoe.process import lives
from asyncmoe.weights.coordinator.driver import UpdateDriver

log = logging.getLogger(__name__)
_POLL_S = 0.02
_LATE_S = 10.0
"""Seconds by which an engine that does not start in time has been killed by its agent."""
_TAGS: dict[MemoryPart, tuple[MemoryTag, ...]] = {MemoryPart.WEIGHTS: ("weights",), MemoryPart.CACHE: ("kv_cache", "cuda_graph")}
_PARTS = {
    DeviceTurn.DRAINING: "engines_drain",
    DeviceTurn.ASLEEP: "engines_out",
    DeviceTurn.WAKING: "engines_in",
    DeviceTurn.GENERATING: "engines_in",
}
"""What engines do before a state is reached, as `asyncmoe.telemetry.schema.Step.switch_seconds` calls it."""


class EngineTurns:
    """Passes the turn on. An engine that fails on the way is fenced.

    Attributes:
        turn: the state.

    Args:
        start_s: limit on an engine's start.
    """

    def __init__(self, driver: UpdateDriver, start_s: float) -> None:
        self.turn = DeviceTurn.GENERATING
        self._driver, self._pool, self._start_s = driver, driver.pool, start_s + _LATE_S
        self._held: dict[Member, Held] = {}
        self._starting: dict[str, float] = {}  # engines, and when each must have joined at the latest
        self._starts = 0  # of trainers
        self._one = asyncio.Lock()

    async def wait_for(self, wanted: DeviceTurn, event: Event | None = None) -> dict[str, float]:
        """Answer a trainer that waits for a state; return what engines did for it, in seconds by part (`_PARTS`).

        Args:
            event: what the trainer says first: `Event.STARTED` or `Event.YIELDED`.

        Raises:
            InvariantBroken: it is out of turn.
            ProtocolError: another trainer has started meanwhile.
            WaitTimeout: responses did not end, or no engine started, in time.
        """
        self._starts += event is Event.STARTED
        mine, seconds = self._starts, defaultdict[str, float](float)
        async with self._one:
            if event is not None:
                await self._pass(event, seconds)
            until = time.monotonic() + self._start_s
            while self.turn is not wanted:
                if mine != self._starts:
                    raise ProtocolError("devices in turn: another trainer has taken this one's place")
                starting = self._any_starts()
                found = step(self.turn, wanted, engines=len(self._pool.present), starting=starting)
                if found is not None:
                    await self._pass(found, seconds)
                elif not starting and time.monotonic() > until:
                    raise WaitTimeout("devices in turn", f"an engine to start, {self.turn.value} until then", self._start_s)
                else:
                    await asyncio.sleep(_POLL_S)
                if found is not None or starting:
                    until = time.monotonic() + self._start_s
        return dict(seconds)

    async def may_start(self, name: str, wait_s: float) -> bool:
        """Wait until an engine may start, and count it as starting until it joins. Return False if it may not within `wait_s`."""
        until = time.monotonic() + wait_s
        while self.turn not in MAY_START:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_POLL_S)
        self._starting[name] = time.monotonic() + self._start_s
        return True

    def _any_starts(self) -> bool:
        here, now = {member.engine.name for member in self._pool.present}, time.monotonic()
        self._starting = {name: until for name, until in self._starting.items() if name not in here and now < until}
        return bool(self._starting)

    async def _pass(self, event: Event, seconds: defaultdict[str, float]) -> None:
        begin = time.perf_counter()
        self.turn = turn = after(self.turn, event)  # at once: from here on no engine starts that may not in the new state
        log.info("devices in turn: %s, so %s", event.value, turn.value)
        if turn is DeviceTurn.DRAINING:
            await self._drain()
            await self._driver.note("writing", self._pool.version)  # a successor must not take over engines that sleep
        else:
            held = HOLDS[turn] & ENGINE
            await self._driver.fence_failing(self._pool.present, lambda member: self._hold(member, held), f"{turn.value}: ")
        await self._until_gone()
        if turn is DeviceTurn.GENERATING:
            self._pool.asleep = False
            self._pool.release()
            self._driver.settled()
        if turn in _PARTS:
            seconds[_PARTS[turn]] += time.perf_counter() - begin

    async def _drain(self) -> None:
        """Let no request in, and cut short those at engines, which `rollout.interruption` continues later. Fence engines that do not end
        theirs in time."""
        self._pool.asleep = True
        self._pool.hold()
        until = time.monotonic() + self._driver.timeout_s
        while count := await self._pool.held():
            if time.monotonic() > until:
                late = [member for member in self._pool.present if member.in_flight + member.elsewhere]
                error = WaitTimeout("devices in turn", f"the end of {count} responses, draining until then", self._driver.timeout_s)
                if not late:  # a rollout worker does not answer
                    raise error
                for member in late:
                    self._pool.fence(member, str(error))
            await self._driver.fence_failing(self._pool.present, self._cut_short, "draining: ")
            await asyncio.sleep(_POLL_S)

    async def _cut_short(self, member: Member) -> None:
        async with self._driver.soon(member, "to cut its responses short"):
            await member.engine.client.abort()

    async def _until_gone(self) -> None:
        """Wait until fenced engines have given their memory back."""
        until = time.monotonic() + self._driver.timeout_s
        while left := [one for one in self._pool.members if one.fenced is not None and one.engine.pid and lives(one.engine.pid)]:
            if time.monotonic() > until:
                raise WaitTimeout(left[0].engine.name, f"its end after SIGKILL, {self.turn.value} until then", self._driver.timeout_s)
            await asyncio.sleep(_POLL_S)

    async def _hold(self, member: Member, held: Held) -> None:
        """Have an engine hold this of its memory."""
        now, client, limit = self._held.get(member, ENGINE), member.engine.client, self._driver.timeout_s
        if gone := [tag for kind in sorted(now - held) for tag in _TAGS[kind]]:
            await client.release_memory(gone, limit)
        if back := [tag for kind in sorted(held - now) for tag in _TAGS[kind]]:
            await client.resume_memory(back, limit)
        if MemoryPart.WEIGHTS in now - held:
            member.compared = False  # weights under adapters come back from the engine's own copy
        if MemoryPart.CACHE in held - now and none_here():
            _check_written(await client.poisoned(limit))
        self._held[member] = held


def _check_written(poisoned: Sequence[Mapping[str, str]]) -> None:
    """Raise WeightSyncError if an engine's ranks have weights that nobody has written since they took their memory again."""
    if found := [f"{name} of rank {rank} ({share})" for rank, names in enumerate(poisoned) for name, share in names.items()]:
        raise WeightSyncError(f"nothing wrote {found[0]}, and {len(found) - 1} more weights, since the engine woke")
