"""The coordinator of the weight protocol, and the ledger of which engine serves which version.

A version reaches the engines in one of three ways. By broadcast, while they are paused:

    WeightsBegin    close the gate; every engine: pause in place, begin_weight_update
    WeightsBucket   all engines concurrently: update_weights_from_distributed, while the sender broadcasts
    WeightsCommit   every engine: end_weight_update, compare checksums, update_weight_version, continue; then open the gate

Shard to shard, while they generate, through the receivers inside them (`asyncmoe.receiver`):

    WeightsStage    only check that all engines are present; the sender and the receivers do the rest.
                    Without staging memory: close the gate; every engine: pause in place, begin_weight_update
    WeightsCommit   close the gate; every engine: pause in place, begin_weight_update, swap, end_weight_update, compare checksums,
                    continue; then open the gate

Adapters, as files that SGLang loads (`asyncmoe.rollout.engines.adapter_slots`):

    WeightsAdapter  all engines concurrently: unload the older of the two loaded versions, load this one; no engine pauses

Every version goes to the *roster*: the engines present when the sender last asked (`EnginesAsk`), in an order that assigns each engine
its ranks of the weight group. When an engine joins or leaves, the next roster differs, and the sender forms a new group with its engines.

All or nothing: an engine that refuses, falls silent or has different checksums is fenced, and an engine that may hold part of a version
never resumes. If loading a bucket fails, all engines are fenced, because the engines in the broadcast wait for the failed one. A sender
that fails or falls silent before the first bucket, or while it stages into separate memory, costs nothing: the engines keep the version
they had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from asyncmoe.config.generation import Interruption
from asyncmoe.errors import AsyncmoeError, WaitTimeout, WeightSyncError
from asyncmoe.receiver import command
from asyncmoe.rollout.engines.pool import Member, Pool
from asyncmoe.rollout.engines.types import EngineLost
from asyncmoe.rpc.messages import (
    Committed,
    Done,
    EngineInfo,
    Engines,
    EnginesAsk,
    WeightsAbort,
    WeightsAdapter,
    WeightsBegin,
    WeightsBucket,
    WeightsCommit,
    WeightsJoin,
    WeightsStage,
)

WeightsRequest = WeightsJoin | WeightsStage | WeightsBegin | WeightsBucket | WeightsCommit | WeightsAdapter | WeightsAbort | EnginesAsk
_ENDING_S = 0.02
"""Seconds between two checks for unfinished responses."""
_NAMED = 8
"""Maximum number of differing parameters that an error names; the rest are counted."""


@dataclass(frozen=True)
class EngineSet:
    """The engines that receive versions: a roster.

    Attributes:
        number: sequence number of this roster.
        offsets: each member's first rank in the weight group, whose rank 0 is the sender.
    """

    number: int
    members: tuple[Member, ...]

    @property
    def offsets(self) -> list[int]:
        return list(accumulate((m.engine.tp for m in self.members), initial=1))[:-1]

    @property
    def world(self) -> int:
        return 1 + sum(m.engine.tp for m in self.members)

    def now(self, pool: Pool) -> EngineSet:
        """Return this set, or the next-numbered one if the present engines that are not leaving differ from its members."""
        members = tuple(m for m in pool.present if not m.leaving)
        return self if members == self.members else EngineSet(self.number + 1, members)


@dataclass
class _Update:
    version: int
    members: list[Member]
    paused: dict[str, float] = field(default_factory=dict)
    """Unix time at which each engine was asked to pause."""
    loading: bool = False
    """True if an engine may hold part of `version`."""
    staged: bool = False
    """True if the version arrives through the receivers."""
    held: bool = False
    """True if the gate was closed for this update."""


class WeightUpdateCoordinator:
    """Answers the sender's requests by driving all engines.

    Args:
        pool: the engines; its members' `version` is the ledger.
        timeout_s: limit on each request, and on the sender's silence between two requests while engines are paused.
        published: awaited with a version once every engine serves it.
        record: called with (engine, begin, end), Unix seconds, for every pause.
        interruption: how responses in progress are handled (`asyncmoe.rollout.engines.interruption`).
        unfinished: returns the number of started trajectories that must finish before a version lands, whether or not they are at an
            engine.
    """

    def __init__(
        self,
        pool: Pool,
        timeout_s: float,
        published: Callable[[int], Awaitable[None]],
        record: Callable[[str, float, float], None],
        interruption: Interruption = "in_place",
        unfinished: Callable[[], int] = lambda: 0,
    ) -> None:
        self._interruption, self._unfinished = interruption, unfinished
        self._pool, self._timeout_s, self._published, self._record = pool, timeout_s, published, record
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = 0
        self._group = ""
        self._roster = EngineSet(0, ())
        self._update: _Update | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None

    def engines_started(self) -> None:
        """Report that all engines accept requests, so that `EnginesAsk` is answered."""
        self._started.set_result(None)

    def engines_failed(self, error: AsyncmoeError) -> None:
        """Report that not all engines will start; everyone who waits for them gets `error`."""
        if not self._started.done():
            self._started.set_exception(error)
            # Mark the exception as retrieved: asyncio warns about a future whose exception nobody retrieves.
            self._started.exception()

    @property
    def awaited(self) -> bool:
        """Whether the trainer waits for engines that have not started."""
        return self._waiting > 0

    async def wait_started(self) -> None:
        """Return when all engines accept requests.

        Raises:
            AsyncmoeError: the error passed to `engines_failed`.
        """
        await asyncio.shield(self._started)

    async def handle(self, request: WeightsRequest) -> Engines | Committed | Done:
        """Answer one request.

        Raises:
            WeightSyncError: an engine refused, died or has different checksums, or the request is out of order.
            WaitTimeout: the engines did not start, or responses did not end, in time.
        """
        match request:
            case EnginesAsk():
                return await self._engines(request)
            case WeightsAbort():
                return await self._abort(request)
            case WeightsJoin():
                await (self._join(request) if request.method == "broadcast" else self._start_receivers(request))
            case WeightsStage():
                await self._stage(request)
            case WeightsBegin():
                await self._expecting_next(self._begin(request.version))
            case WeightsBucket():
                await self._expecting_next(self._bucket(request))
            case WeightsAdapter():
                return await self._adapter(request)
            case WeightsCommit():
                self._listen(False)
                return await self._commit(request)
        return Done()

    async def _engines(self, request: EnginesAsk) -> Engines:
        self._waiting += 1
        try:
            await asyncio.wait_for(self.wait_started(), request.wait_s)
        except TimeoutError:
            raise WaitTimeout("the engines", "start", request.wait_s) from None
        finally:
            self._waiting -= 1
        self._pool.fence_dead()
        concerned = self._update.members if self._update is not None else self._roster.members
        lost = tuple(member.engine.name for member in concerned if member.fenced is not None)
        roster = self._roster = self._roster.now(self._pool)
        devices = [await m.engine.client.device() if request.devices else "" for m in roster.members]
        infos = tuple(
            EngineInfo(m.engine.name, m.engine.tp, m.engine.ep, offset, m.version, m.engine.host, device)
            for m, offset, device in zip(roster.members, roster.offsets, devices, strict=True)
        )
        return Engines(infos, roster.world, roster.number, lost)

    async def _join(self, request: WeightsJoin) -> None:
        members, world = self._whole(), self._roster.world
        self._group = request.group

        async def join(member: Member) -> None:
            offset = self._offset(member)
            await member.engine.client.join_group(
                request.host, request.port, offset, world, request.group, request.backend, self._timeout_s
            )

        _raise(await _on_each(members, join), f"joining the weight group {request.group}")

    async def _start_receivers(self, request: WeightsJoin) -> None:
        """Start the receivers inside an update that changes nothing, because SGLang only lets calls into its workers during an update."""
        update = self._claim(self._pool.version)
        await self._stand_still(update)

        async def start(member: Member) -> None:
            first = request.senders + self._offset(member) - 1
            joins = [command.JoinCommand(request.host, request.port, request.group, first + rank) for rank in range(member.engine.tp)]
            await member.engine.client.command_receivers(joins, self._timeout_s)

        failed = await self._fencing(update, start)
        await self._give_up(update)
        _raise(failed, "starting the weight receivers")

    async def _stage(self, request: WeightsStage) -> None:
        update = self._claim(request.version)
        update.staged = True
        if request.in_place:
            await self._expecting_next(self._stand_still(update))
            update.loading = True

    async def _begin(self, version: int) -> None:
        await self._stand_still(self._claim(version))

    def _claim(self, version: int) -> _Update:
        # An update that only stages may be left from a sender that is gone, so a new one replaces it.
        if self._update is not None and self._update.held:
            raise WeightSyncError(f"cannot begin version {version}: version {self._update.version} is still open")
        self._update = _Update(version, self._whole())
        return self._update

    async def _stand_still(self, update: _Update) -> None:
        """Close the gate and pause all engines; if an engine fails to pause, fence it, resume the others and raise."""
        update.held = True
        await self._interrupt(update)
        self._pool.hold()

        async def begin(member: Member) -> None:
            update.paused[member.engine.name] = time.time()
            await member.engine.client.pause(retract=self._interruption == "retract")
            if self._interruption == "retract":
                await member.engine.client.flush()  # else retracted requests would reuse the old weights' keys and values
            await member.engine.client.begin_update()

        failed = await _on_each(update.members, begin)
        for member, error in failed:
            self._pool.fence(member, str(error))
        if failed:
            await self._give_up(update)
            _raise(failed, f"beginning version {update.version}")

    async def _interrupt(self, update: _Update) -> None:
        """Wait until no request is at an engine, unless responses survive the update."""
        if self._interruption in ("in_place", "retract"):
            return
        until = time.monotonic() + self._timeout_s
        while count := self._unfinished():
            await self._later(update, until, f"{count} trajectories")
        self._pool.close()
        while count := sum(member.in_flight for member in self._pool.serving):
            if self._interruption != "drain":
                await self._fencing(update, lambda member: member.engine.client.abort())
            await self._later(update, until, f"{count} responses")

    async def _later(self, update: _Update, until: float, unfinished: str) -> None:
        """Sleep until the next check; after `until`, drop the update and raise WaitTimeout."""
        if time.monotonic() > until:
            self._close(update)
            what = f"the end of {unfinished} before version {update.version} (rollout.interruption {self._interruption})"
            raise WaitTimeout("the engines", what, self._timeout_s)
        await asyncio.sleep(_ENDING_S)

    async def _bucket(self, request: WeightsBucket) -> None:
        update = self._open(request.version)
        if update.staged:
            raise WeightSyncError(f"version {update.version} is staged by the receivers; it takes no buckets")
        update.loading = True

        async def load(member: Member) -> None:
            try:
                await member.engine.client.load_bucket(request.names, request.dtypes, request.shapes, self._group, self._timeout_s)
            except AsyncmoeError as error:
                self._fence_all(update, str(error))
                raise

        failed = await _on_each(update.members, load)
        if failed:
            self._close(update)
            _raise(failed, f"loading version {update.version}")

    async def _commit(self, request: WeightsCommit) -> Committed:
        update = self._open(request.version)
        if update.staged and not update.held:
            await self._stand_still(update)
        failed = await self._swap(update, request.update) if update.staged else []

        async def finish(member: Member) -> None:
            await member.engine.client.end_update()
            if request.checksums:
                _compare(request.checksums, await member.engine.client.checksums(self._timeout_s))

        failed += await self._fencing(update, finish)
        pauses: dict[str, float] = {}

        async def resume(member: Member) -> None:
            if not update.staged:
                await member.engine.client.set_version(update.version)
            await member.engine.client.resume()
            pauses[member.engine.name] = self._standing_ends(update, member)
            member.version, member.waiting = update.version, False

        failed += await self._fencing(update, resume)
        self._close(update)
        # An engine whose process has ended is fenced and serves nothing; the others have the version.
        _raise([(m, error) for m, error in failed if not isinstance(error, EngineLost)], f"publishing version {update.version}")
        if not pauses:
            raise WeightSyncError(f"publishing version {update.version}: no engine is left; {update.members[0].fenced}")
        await self._published(update.version)
        return Committed(update.version, tuple(1e3 * seconds for seconds in pauses.values()))

    async def _adapter(self, request: WeightsAdapter) -> Committed:
        """Load a version as an adapter; no engine pauses, and requests in progress keep their version."""
        members = self._whole()

        async def load(member: Member) -> None:
            if member.slots is None:
                raise WeightSyncError(f"{member.engine.name} was started without adapter loading (sync.method broadcast)")
            await member.slots.publish(request.version, Path(request.folder))
            member.version, member.waiting = request.version, False

        failed = await _on_each(members, load)
        for member, error in failed:
            self._pool.fence(member, str(error))
        _raise(failed, f"publishing version {request.version}")
        await self._published(request.version)
        return Committed(request.version, (0.0,) * len(members))

    async def _swap(self, update: _Update, number: int) -> list[tuple[Member, AsyncmoeError]]:
        """Have each rank swap in the weights it received; return the engines that failed."""
        update.loading = True

        async def swap(member: Member) -> None:
            commits = [command.CommitCommand(update.version, number)] * member.engine.tp
            await member.engine.client.command_receivers(commits, self._timeout_s, update.version)

        return await self._fencing(update, swap)

    async def _abort(self, request: WeightsAbort) -> Done:
        update = self._update
        if update is None or update.version != request.version:
            return Done()
        self._listen(False)
        await self._end(update, f"the sender failed: {request.why}")
        return Done()

    async def _end(self, update: _Update, why: str) -> None:
        """End an update that will not be committed; if nothing was loaded, the engines resume with the version they have."""
        if update.loading:
            self._fence_all(update, why)
            self._close(update)
        elif update.held:
            await self._give_up(update)
        else:
            self._close(update)

    async def _give_up(self, update: _Update) -> None:
        async def resume(member: Member) -> None:
            await member.engine.client.end_update()
            await member.engine.client.resume()
            self._standing_ends(update, member)

        await self._fencing(update, resume)
        self._close(update)

    async def _fencing(self, update: _Update, action: Callable[[Member], Awaitable[None]]) -> list[tuple[Member, AsyncmoeError]]:
        failed = await _on_each([member for member in update.members if member.fenced is None], action)
        for member, error in failed:
            self._pool.fence(member, str(error))
        return failed

    async def _expecting_next(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`; if the sender then falls silent while the engines are paused, end the update."""
        self._listen(False)
        await work
        self._listen(True)

    def _listen(self, for_next: bool) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = asyncio.get_running_loop().call_later(self._timeout_s, self._fell_silent) if for_next else None

    def _fell_silent(self) -> None:
        if (update := self._update) is not None:
            self._ending = asyncio.ensure_future(self._end(update, f"the sender was silent for {self._timeout_s:g} s"))

    def _fence_all(self, update: _Update, why: str) -> None:
        for member in update.members:
            self._pool.fence(member, f"it may hold part of version {update.version}: {why}")

    def _standing_ends(self, update: _Update, member: Member) -> float:
        """Record an engine's pause; return its length in seconds."""
        begin, end = update.paused[member.engine.name], time.time()
        self._record(member.engine.name, begin, end)
        return end - begin

    def _open(self, version: int) -> _Update:
        if self._update is None or self._update.version != version:
            current = "none" if self._update is None else f"version {self._update.version}"
            raise WeightSyncError(f"version {version} is not open (open: {current})")
        return self._update

    def _close(self, update: _Update) -> None:
        if self._update is update:
            self._update = None
            if update.held:
                self._pool.release()

    def _whole(self) -> list[Member]:
        """Return the roster's members; raise if any is fenced, because the weight group needs all of them."""
        if not self._roster.number:
            self._roster = self._roster.now(self._pool)
        lost = [f"{m.engine.name}: {m.fenced}" for m in self._roster.members if m.fenced is not None]
        if lost:
            raise WeightSyncError(f"an engine of the weight group is gone ({'; '.join(lost)})")
        return list(self._roster.members)

    def _offset(self, member: Member) -> int:
        return self._roster.offsets[self._roster.members.index(member)]

    def updating(self, member: Member) -> bool:
        """Return True if an open update goes to this engine."""
        return self._update is not None and member in self._update.members


async def _on_each(members: Sequence[Member], action: Callable[[Member], Awaitable[None]]) -> list[tuple[Member, AsyncmoeError]]:
    """Run `action` on all members concurrently; return the members that failed, the cause before its consequences."""
    results = await asyncio.gather(*(action(member) for member in members), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, AsyncmoeError):
            raise result
    failed = [(m, result) for m, result in zip(members, results, strict=True) if isinstance(result, AsyncmoeError)]
    return sorted(failed, key=lambda pair: isinstance(pair[1], EngineLost))


def _raise(failed: Sequence[tuple[Member, AsyncmoeError]], doing: str) -> None:
    if failed:
        raise WeightSyncError(f"{doing}: {failed[0][1]}") from failed[0][1]


def _compare(expected: Sequence[Mapping[str, str]], found: Sequence[Mapping[str, str]]) -> None:
    """Raise if an engine's ranks do not hold the expected values; names without an expected checksum (buffers) are not compared."""
    if len(expected) != len(found):
        raise WeightSyncError(f"checksums: got {len(found)} ranks, expected {len(expected)}")
    wrong = [
        f"{name} of rank {rank}"
        for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True))
        for name, checksum in ours.items()
        if theirs.get(name) != checksum
    ]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise WeightSyncError(f"checksums differ: {', '.join(wrong[:_NAMED])}{more}")
