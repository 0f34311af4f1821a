"""Moves all engines of an update through its states: pauses, resumes and fences them, all at the same time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.takeover import Changing, EngineWeights
from asyncmoe.engines.types import EngineLost
from asyncmoe.errors import AsyncmoeError, WaitTimeout, WeightSyncError
from asyncmoe.telemetry.clock import unix
from asyncmoe.weights.coordinator import state
from asyncmoe.weights.coordinator.roster import EngineSet
from asyncmoe.weights.coordinator.state import UpdatePhase, UpdateState

log = logging.getLogger(__name__)
Failures = list[tuple[Member, AsyncmoeError]]
"""Engines that failed, and why; the cause before its consequences."""
_ENDING_S = 0.02
"""Seconds between two checks for unfinished responses."""
PATIENCE = 1 / 4
"""Share of `UpdateDriver.pause_s` for which all engines wait for one that does not answer."""
_IN_FLIGHT: tuple[Interruption, ...] = ("in_place", "retract")
"""Modes in which responses stay at the engines while a version lands."""


@dataclass(eq=False)
class OpenUpdate:
    """The open update and its engines.

    Attributes:
        session: whether the paused engines have a weight update open (`Engine.begin_update`).
        paused: by engine name, the Unix time at which the engine was asked to pause; removed once it has resumed.
    """

    state: UpdateState
    members: list[Member]
    paused: dict[str, float] = field(default_factory=dict)
    session: bool = True

    @property
    def version(self) -> int:
        return self.state.version


class UpdateDriver:
    """Drives the engines of a run through updates.

    Attributes:
        pool: the engines; its members' `version` is the ledger.
        timeout_s: limit on each call to an engine, and on each wait for responses.
        pause_s: limit on each part of an engine's pause that does not involve the sender (`soon`). It can be short, because a running
            engine pauses after at most one forward pass, and must be, because all other engines wait meanwhile.
        interruption: how responses in progress are handled (`asyncmoe.rollout.episodes.interruption`).
        roster: the engines that receive versions.
        group: name of their process group with the sender, if it broadcasts.
        landed: whether a version has landed since the engines started.

    Args:
        record: called with (engine, begin, end), Unix seconds, for every pause.
        unfinished: returns the number of started trajectories that must finish before a version lands, whether at an engine or not.
        note: saves which weights the engines have, for a later controller (`asyncmoe.engines.succession`), and returns once that is saved;
            None: not saved.
    """

    def __init__(
        self,
        pool: Pool,
        timeout_s: float,
        record: Callable[[str, float, float], None],
        interruption: Interruption = "in_place",
        unfinished: Callable[[], int] = lambda: 0,
        pause_s: float | None = None,
        note: Callable[[EngineWeights], Awaitable[None]] | None = None,
    ) -> None:
        self._note, self._noting, self.landed = note, set[asyncio.Task[None]](), False
        self._served = (0, 0)  # version and lineage that engines last served
        self.pool, self.timeout_s, self.interruption = pool, timeout_s, interruption
        self.pause_s = timeout_s if pause_s is None else pause_s
        self._record, self._unfinished = record, unfinished
        self.roster = EngineSet(0, ())
        self.group = ""
        self.current: OpenUpdate | None = None

    def whole(self) -> list[Member]:
        """Return the roster's members; raise if any is fenced, because the weight group needs all of them."""
        if not self.roster.members:
            self.roster = self.roster.now(self.pool)
        lost = [f"{m.engine.name}: {m.fenced}" for m in self.roster.members if m.fenced is not None]
        if lost:
            raise WeightSyncError(f"an engine of the weight group is gone ({'; '.join(lost)})")
        return list(self.roster.members)

    def claim(self, version: int, staged: bool = False, *, session: bool = True) -> OpenUpdate:
        """Open an update to `version`; see `state.claim` and `OpenUpdate`."""
        claimed = state.claim(self._state, version, staged)
        self.current = OpenUpdate(claimed, self.whole(), session=session)
        return self.current

    def expect(self, version: int) -> OpenUpdate:
        """Return the open update; see `state.expect`."""
        state.expect(self._state, version)
        assert self.current is not None
        return self.current

    async def pause_all(self, update: OpenUpdate, changing: Changing = "loading") -> None:
        """Close the gate and pause all engines; if an engine fails to pause, fence it, resume the others and raise.

        Args:
            changing: "writing" if the engines' parameters are written in place.
        """
        await self.close_gate(update, changing)
        failed = await self._pause(update) if self.current is update else []
        for member, error in failed:
            self.pool.fence(member, str(error))
        if self.current is not update:  # aborted meanwhile
            await self.fencing(update, partial(self._resume, update))
            self.pool.release()
            raise WeightSyncError(f"version {update.version} was given up while engines paused")
        if failed:
            await self.give_up(update)
            raise_first(failed, f"beginning version {update.version}")

    async def close_gate(self, update: OpenUpdate, changing: Changing = "loading") -> None:
        """Close the gate to requests that may not stay at the engines, and save which weights the engines may have from now on.

        If an engine seems to hang, first wait until it is trusted again or fenced, so that the others need not wait for it in a pause. The
        update may be given up meanwhile.

        Args:
            changing: as for `pause_all`.
        """
        until = time.monotonic() + self.timeout_s
        while any(member.suspect and member.fenced is None for member in update.members) and time.monotonic() < until:
            await asyncio.sleep(_ENDING_S)
        update.state = state.pause(update.state)
        await self._interrupt(update)
        await self.note(changing, update.version)

    async def _pause(self, update: OpenUpdate) -> Failures:
        """Pause all engines at the same time; return those that failed.

        An engine that takes longer than `PATIENCE` of `pause_s` may hang, so the others resume until it has paused or failed. They stay
        paused if the interruption mode lets no response stay at an engine during an update.
        """
        self.pool.hold()
        await self.pool.held()
        pausing = {member: asyncio.ensure_future(self._begin(update, member)) for member in update.members}
        patience = self.pause_s * PATIENCE if self.interruption in _IN_FLIGHT else None
        paused, late = await asyncio.wait(pausing.values(), timeout=patience) if pausing else (set(), set())
        if late and paused:
            early = [member for member, task in pausing.items() if task in paused and task.exception() is None]
            resumed = await on_each(early, partial(self._resume, update))
            self.pool.release()
            await asyncio.wait(late)
            if self.current is not update:
                return []
            self.pool.hold()
            await self.pool.held()
            left = [member for member in early if member not in dict(resumed)]
            pausing |= {member: asyncio.ensure_future(self._begin(update, member)) for member in left}
            return resumed + await on_each(list(pausing), pausing.__getitem__)
        return await on_each(list(pausing), pausing.__getitem__)

    async def _begin(self, update: OpenUpdate, member: Member) -> None:
        retract = self.interruption == "retract"
        update.paused[member.engine.name] = unix()
        async with self.soon(member, f"to pause for version {update.version}"):
            await member.engine.client.pause(retract=retract)
            if retract:
                await member.engine.client.flush()  # else retracted requests would reuse the old weights' keys and values
            if update.session:
                await member.engine.client.begin_update()
        update.paused.setdefault(member.engine.name, unix())  # absent if the update was given up meanwhile

    async def _resume(self, update: OpenUpdate, member: Member) -> None:
        if member.engine.name not in update.paused:
            return
        async with self.soon(member, "to go on with the version it has"):
            if update.session:
                await member.engine.client.end_update()
            await member.engine.client.resume()
        self.pause_ended(update, member)

    async def give_up(self, update: OpenUpdate) -> None:
        """Resume paused engines with their current version, and close the update."""
        await self.fencing(update, partial(self._resume, update))
        self.close(update)

    async def end(self, update: OpenUpdate, why: str) -> None:
        """End an update that will not be committed; if nothing was loaded, the engines resume with their current version.

        Raises:
            WeightSyncError: the update is already being concluded.
        """
        update.state = state.conclude(update.state)
        if update.state.phase is UpdatePhase.LOADING and not self.pool.asleep:  # else they get all weights before they sample
            self.fence_all(update, why)
        await self.give_up(update)

    @asynccontextmanager
    async def soon(self, member: Member, what: str) -> AsyncIterator[None]:
        """Limit the time of calls to a paused engine, if they depend on nobody else: meanwhile all other engines wait, and nothing probes
        this one.

        Raises:
            WaitTimeout: the calls took longer than `pause_s`.
        """
        try:
            async with asyncio.timeout(self.pause_s):
                yield
        except TimeoutError as error:
            raise WaitTimeout(member.engine.name, what, self.pause_s) from error

    def close(self, update: OpenUpdate) -> None:
        """Forget an update, and reopen the gate if the update closed it."""
        if self.current is update:
            self.current = None
            if update.state.gate_closed:
                self.pool.release()
                self.settled()

    async def fencing(self, update: OpenUpdate, action: Callable[[Member], Awaitable[None]]) -> Failures:
        """Run `action` on every engine that is not fenced; fence those that fail."""
        return await self.fence_failing([member for member in update.members if member.fenced is None], action)

    async def fence_failing(self, members: Sequence[Member], action: Callable[[Member], Awaitable[None]], doing: str = "") -> Failures:
        """Run `action` on engines; fence those that fail, for a reason that begins with `doing`."""
        failed = await on_each(members, action)
        for member, error in failed:
            self.pool.fence(member, f"{doing}{error}")
        return failed

    def fence_all(self, update: OpenUpdate, why: str) -> None:
        """Fence every engine of an update, because it may have part of the version."""
        for member in update.members:
            self.pool.fence(member, f"it may hold part of version {update.version}: {why}")

    def pause_ended(self, update: OpenUpdate, member: Member) -> float:
        """Record an engine's pause; return its length in seconds."""
        begin, end = update.paused.pop(member.engine.name), unix()
        self._record(member.engine.name, begin, end)
        return end - begin

    def _holding(self, changing: Changing = "", coming: int = 0) -> EngineWeights:
        version, new = self.pool.version, self.pool.lineage
        if changing == "loading" and any(member.version == coming and member.lineage != new for member in self.pool.serving):
            version = coming  # so that the old and the new lineage of this version cannot be confused
        lineage = min((member.lineage for member in self.pool.serving if member.version == version), default=0)
        if self.pool.serving:
            self._served = version, lineage
        version, lineage = self._served  # if no engine serves, what engines last served, as restarted engines have no version
        return EngineWeights(version, lineage, self.landed, changing, coming, new)

    async def note(self, changing: Changing, coming: int) -> None:
        """Save that engines are changing."""
        if self._note is not None:
            await self._note(self._holding(changing, coming))

    def settled(self) -> None:
        """Save that no engine is changing any more. Nothing waits for the save: until it is done, engines only seem to be changing."""
        if self._note is not None and not self.pool.asleep:
            task = asyncio.ensure_future(_told(self._note(self._holding())))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    @property
    def _state(self) -> UpdateState | None:
        return None if self.current is None else self.current.state

    async def _interrupt(self, update: OpenUpdate) -> None:
        """Wait until no request is at an engine, unless responses may stay there during the update."""
        if self.interruption in _IN_FLIGHT:
            return
        until = time.monotonic() + self.timeout_s
        while count := self._unfinished():
            await self._later(update, until, f"{count} trajectories")
        self.pool.close()
        while count := await self.pool.held():
            if self.interruption != "drain":
                await self.fencing(update, lambda member: member.engine.client.abort())
            await self._later(update, until, f"{count} responses")

    async def _later(self, update: OpenUpdate, until: float, unfinished: str) -> None:
        """Sleep until the next check; after `until`, drop the update and raise WaitTimeout."""
        if time.monotonic() > until:
            self.close(update)
            what = f"the end of {unfinished} before version {update.version} (rollout.interruption {self.interruption})"
            raise WaitTimeout("the engines", what, self.timeout_s)
        await asyncio.sleep(_ENDING_S)


async def on_each(members: Sequence[Member], action: Callable[[Member], Awaitable[None]]) -> Failures:
    """Run `action` on all members concurrently; return the members that failed."""
    results = await asyncio.gather(*(action(member) for member in members), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, AsyncmoeError):
            raise result
    failed = [(m, result) for m, result in zip(members, results, strict=True) if isinstance(result, AsyncmoeError)]
    return sorted(failed, key=lambda pair: isinstance(pair[1], EngineLost))


def raise_first(failed: Failures, doing: str) -> None:
    """Raise WeightSyncError if any engine failed."""
    if failed:
        raise WeightSyncError(f"{doing}: {failed[0][1]}") from failed[0][1]


async def _told(note: Awaitable[None]) -> None:
    try:
        await note
    except AsyncmoeError as error:
        log.warning("the engines' weights are not recorded: %s", error)
