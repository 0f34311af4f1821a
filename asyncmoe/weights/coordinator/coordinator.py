"""The coordinator: answers the sender's requests, and publishes a version once every engine serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from asyncmoe.engines.member import Member
from asyncmoe.engines.types import EngineLost
from asyncmoe.errors import AsyncmoeError, Disagreement, RunStopping, WaitTimeout, WeightSyncError
from asyncmoe.occupancy import Event
from asyncmoe.rpc.messages import (
    Committed,
    Done,
    EngineInfo,
    Engines,
    EnginesAsk,
    EngineStarts,
    TurnAwaited,
    TurnTaken,
    WeightsAbort,
    WeightsBegin,
    WeightsBucket,
    WeightsCommit,
    WeightsFiles,
    WeightsJoin,
    WeightsRequest,
    WeightsStage,
)
from asyncmoe.weights.coordinator import checksums, state, ways
from asyncmoe.weights.coordinator.device_turns import EngineTurns
from asyncmoe.weights.coordinator.driver import Failures, OpenUpdate, UpdateDriver, on_each, raise_first
from asyncmoe.weights.coordinator.roster import EngineSet

_ROSTERS = 32
"""Number of bits for the roster numbers of one controller."""


class WeightUpdateCoordinator:
    """Answers the sender's requests by driving all engines.

    Args:
        start_s: limit on the wait for an engine to start, where devices are used in turn.
        driver: drives the engines; its `timeout_s` also limits how long the sender may be silent while engines are paused.
        published: called with a version, and awaited, once every engine serves that version.
    """

    def __init__(self, driver: UpdateDriver, published: Callable[[int], Awaitable[None]], start_s: float = 0.0) -> None:
        self.driver, self._published = driver, published
        self._pool, self._timeout_s = driver.pool, driver.timeout_s
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._silence: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        self._under_way: set[asyncio.Future[Engines | Committed | Done]] = set()
        self._one = asyncio.Lock()
        self._kept: checksums.Checksums = ()
        self._turns = EngineTurns(driver, start_s)

    def succeed(self, epoch: int, landed: bool) -> None:
        """Continue with the engines of earlier controllers.

        Args:
            epoch: number of this controller, so that no roster number of an earlier controller is used again.
            landed: whether these engines have received a version.
        """
        self.driver.roster, self.driver.landed = EngineSet(epoch << _ROSTERS, ()), landed

    def engines_started(self) -> None:
        """Report that all engines accept requests, so that `EnginesAsk` is answered."""
        self._started.set_result(None)

    def engines_failed(self, error: AsyncmoeError) -> None:
        """Report that not all engines will start; everyone waiting for them gets `error`."""
        if not self._started.done():
            self._started.set_exception(error)
            # Mark the exception as retrieved: asyncio warns about a future whose exception nobody retrieves.
            self._started.exception()

    def stop(self) -> None:
        """Report that the run is stopping: a trainer that waits for engines, the first or new ones, gets `RunStopping`. Idempotent."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    async def wait_started(self) -> None:
        """Wait until all engines accept requests.

        Raises:
            AsyncmoeError: the error passed to `engines_failed`.
        """
        await asyncio.shield(self._started)

    def updating(self, member: Member) -> bool:
        """Return True if an open update goes to this engine."""
        return self.driver.current is not None and member in self.driver.current.members

    def paused(self, member: Member) -> bool:
        """Return True if this engine cannot sample at the moment: it is paused for an open update, or sleeps."""
        return self._pool.asleep or (self.driver.current is not None and member.engine.name in self.driver.current.paused)

    async def compare_loaded(self, expected: checksums.Checksums, kept: bool) -> None:
        """Compare the weights that all engines loaded from the model's files with the trainer's; an engine lost meanwhile is fenced.

        Args:
            kept: as in `WeightsLoaded`; an engine that joins later and differs is fenced.

        Raises:
            Disagreement: names an engine, and the first parameters that differ.
        """
        self._kept = expected if kept else ()
        for member, error in await self._compare_new(expected):
            if not isinstance(error, EngineLost | WaitTimeout):
                raise Disagreement(f"{member.engine.name} has loaded other weights from the model's files than the trainer: {error}")
            self._pool.fence(member, str(error))

    async def _compare_new(self, expected: checksums.Checksums) -> Failures:
        """Compare the engines that have not been compared; return those that differ or fail."""

        async def compare(member: Member) -> None:
            checksums.compare(expected, await member.engine.client.checksums(self._timeout_s))
            member.compared = True

        return await on_each([member for member in self._pool.present if not member.compared], compare)

    async def forget_sender(self, why: str) -> None:
        """Abandon the requests of a lost sender. The next sender meets the engines anew.

        An open update ends as any abandoned one does (`UpdateDriver.end`); an update that is already committing lands.

        Raises:
            WaitTimeout: engines did not finish the sender's requests within the limit of a request.
        """
        late = (await asyncio.wait(self._under_way, timeout=self._timeout_s))[1] if self._under_way else ()
        if late:
            raise WaitTimeout("the engines", "the end of a lost trainer's requests", self._timeout_s)
        self._listen(False)
        if self._ending is not None:
            await self._ending
        if (update := self.driver.current) is not None:
            await self.driver.end(update, why)
        self.driver.roster = self.driver.roster.anew(self._pool)

    async def handle(self, request: WeightsRequest, check: Callable[[], None] = lambda: None) -> Engines | Committed | TurnTaken | Done:
        """Answer one request.

        Args:
            check: called once the earlier requests are answered; raises if this request is out of turn by then.

        Raises:
            WeightSyncError: an engine refused, died or has different checksums, or the request is out of order.
            RunStopping: see `stop`.
            WaitTimeout: the engines did not start, or responses did not end, in time.
        """
        if isinstance(request, EnginesAsk):
            return await self._engines(request)  # changes no engine
        if isinstance(request, TurnAwaited):
            return await self._pass_turn(request)
        if isinstance(request, EngineStarts):
            return TurnTaken({}) if await self._turns.may_start(request.name, request.wait_s) else Done()
        answering = asyncio.ensure_future(self._in_turn(request, check))
        self._under_way.add(answering)
        answering.add_done_callback(self._under_way.discard)
        return await answering

    async def _pass_turn(self, request: TurnAwaited) -> TurnTaken:
        if request.event is Event.STARTED:
            await self.wait_started()
            await self.forget_sender("a trainer has started")
        return TurnTaken(await self._turns.wait_for(request.turn, request.event))

    async def _in_turn(self, request: WeightsRequest, check: Callable[[], None]) -> Engines | Committed | Done:
        """Answer requests one at a time, in the sender's order; only an abort interrupts a waiting request."""
        if isinstance(request, WeightsAbort):
            return await self._drive(request)
        async with self._one:
            check()
            return await self._drive(request)

    async def _drive(self, request: WeightsRequest) -> Engines | Committed | Done:
        match request:
            case WeightsAbort():
                if (open_now := self.driver.current) is not None and open_now.version == request.version:
                    self._listen(False)
                    await self.driver.end(open_now, f"the sender failed: {request.why}")
            case WeightsJoin():
                await (ways.join_group if request.method == "broadcast" else ways.start_receivers)(self.driver, request)
            case WeightsStage():
                update = self.driver.claim(request.version, staged=True)
                if request.in_place:
                    await self._expecting_next(ways.pause_for_writing(self.driver, update))
            case WeightsBegin():
                await self._expecting_next(self.driver.pause_all(self.driver.claim(request.version), "writing"))
            case WeightsBucket():
                await self._expecting_next(ways.load_bucket(self.driver, request))
            case WeightsFiles():
                await self.driver.pause_all(self.driver.claim(request.version, session=False))
                return await self._commit(request)
            case WeightsCommit():
                self._listen(False)
                return await self._commit(request)
        return Done()

    async def _engines(self, request: EnginesAsk) -> Engines:
        await asyncio.wait((self._started, self._stopping), timeout=request.wait_s, return_when=asyncio.FIRST_COMPLETED)
        if self._started.done():
            self._started.result()
        elif self._stopping.done():
            raise RunStopping("the run is being stopped, and its engines have not started")
        else:
            raise WaitTimeout("the engines", "their start", request.wait_s)
        silent = request.probe and any(await asyncio.gather(*map(self._pool.silent, self.driver.roster.members)))
        self._pool.fence_dead()
        for member, error in await self._compare_new(self._kept) if self._kept else ():
            self._pool.fence(member, f"its loaded weights: {error}")
        driver = self.driver
        concerned = driver.roster.members if driver.current is None else driver.current.members
        lost = tuple(member.engine.name for member in concerned if member.fenced is not None)
        roster = driver.roster = driver.roster.now(self._pool)
        infos = tuple(
            EngineInfo(m.engine.name, m.engine.tp, m.engine.ep, offset, m.version, m.engine.host, m.waiting)
            for m, offset in zip(roster.members, roster.offsets, strict=True)
        )
        awaited = self._pool.awaited
        if awaited and self._stopping.done():
            raise RunStopping("the run is being stopped, and no engine is left")
        return Engines(infos, roster.world, roster.number, lost, awaited, silent)

    async def _commit(self, request: WeightsCommit | WeightsFiles) -> Committed:
        update = self.driver.expect(request.version)
        # One call to each engine lands the version, unless keys and values are dropped before the swap, or checksums compared after it.
        separately = update.state.gate_closed or self.driver.interruption == "retract" or bool(request.checksums)
        if isinstance(request, WeightsCommit) and update.state.staged and not separately:
            failed, pauses = await ways.swap_at_once(self.driver, update, request.update)
        else:
            failed, pauses = await self._commit_paused(update, request)
        self.driver.landed = self.driver.landed or bool(pauses)
        self.driver.close(update)
        return await self._publish(update.version, tuple(1e3 * seconds for seconds in pauses), failed)

    async def _commit_paused(self, update: OpenUpdate, request: WeightsCommit | WeightsFiles) -> tuple[Failures, list[float]]:
        if not update.state.gate_closed:
            await self.driver.pause_all(update)  # an abort may still end the update
        update.state = state.conclude(update.state)
        failed: Failures = []
        if isinstance(request, WeightsFiles):
            failed = await ways.load_files(self.driver, update, request.folder)
        elif update.state.staged:
            failed = await ways.swap(self.driver, update, request.update)

        async def finish(member: Member) -> None:
            if update.session:
                async with self.driver.soon(member, f"to end the update to version {update.version}"):
                    await member.engine.client.end_update()
            if request.checksums:
                checksums.compare(request.checksums, await member.engine.client.checksums(self._timeout_s))

        failed += await self.driver.fencing(update, finish)
        pauses: list[float] = []

        async def resume(member: Member) -> None:
            async with self.driver.soon(member, f"to resume with version {update.version}"):
                if not update.state.staged:
                    await member.engine.client.set_version(update.version)
                await member.engine.client.resume()
            pauses.append(self.driver.pause_ended(update, member))
            member.serve(update.version, self._pool.lineage)

        failed += await self.driver.fencing(update, resume)
        return failed, pauses

    async def _publish(self, version: int, pause_ms: tuple[float, ...], failed: Failures) -> Committed:
        """Publish a version that some engines serve now, and report engines that refused it.

        Args:
            pause_ms: pauses of the engines that serve it.

        Raises:
            WeightSyncError: an engine refused it, or no engine is left.
            Disagreement: no engine has it, and one has other weights.
        """
        # Publish before raising any error: engines that resumed already sample this version.
        if pause_ms:
            await self._published(version)
        # An engine that is gone or silent is fenced and serves nothing; the others have the version.
        refused = [(member, error) for member, error in failed if not isinstance(error, EngineLost | WaitTimeout)]
        for member, error in refused if not pause_ms else ():
            if isinstance(error, Disagreement):  # the next engine would have them too
                raise Disagreement(f"publishing version {version}: {member.engine.name}: {error}")
        raise_first(refused, f"publishing version {version}")
        if not pause_ms:
            gone = [member.fenced for member in self._pool.members if member.fenced is not None]
            why = gone[-1] if gone else "all have left"
            raise WeightSyncError(f"publishing version {version}: no engine is left; {why}")
        return Committed(pause_ms)

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
        if (update := self.driver.current) is not None and not update.state.concluding:
            self._ending = asyncio.ensure_future(self.driver.end(update, f"the sender was silent for {self._timeout_s:g} s"))
