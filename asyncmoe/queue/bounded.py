"""The queue between engines and trainer: bounded, oldest first, leased by step.

One asyncio loop owns it; nothing here is thread-safe. Every trajectory that was started ends in exactly one of trained, dropped
(with a reason) or rejected (with a reason), and the counts add up after every call (`asyncmoe.queue.admission.Ledger`).

Promises to the trainer. The answer to `lease(step)` is decided once: all ranks get the same, whenever they ask. A leased
trajectory keeps its arrays until `commit(step)` or `release(step)`. None is trained twice. None that is trained has a token more
than eta versions older than the trainer's weights.

After a resume at step k (`trained_steps=k`) the versions and the capacity law count on from k, as if everything up to k had passed
through this queue. What an earlier process had queued, leased or running is not here: it counts as never started, and is
sampled again. Steps after k that an earlier process trained but did not save are trained again, on new trajectories.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from asyncmoe.errors import AsyncmoeError, ConfigError, InvariantBroken, ProtocolError, TrajectoryRejected, WaitTimeout
from asyncmoe.queue.admission import Admission, Ledger
from asyncmoe.queue.changes import Changes
from asyncmoe.queue.lane import Group, Lane, pack
from asyncmoe.record import NOTHING, Recording
from asyncmoe.trajectory import NOT_SAMPLED, Buffer, Trajectory, part
from asyncmoe.validity import validate
from asyncmoe.wire.messages import Leased, Phase

MAX_LEASE_WAIT_S = 86_400.0


@dataclass(frozen=True)
class QueueStats:
    """What the queue holds and has seen; counts of trajectories."""

    version: int
    depth: int
    running: int
    leased: int
    started: int
    accepted: int
    trained: int
    dropped: dict[str, int]
    rejected: dict[str, int]
    demonstrations: int
    """Demonstrations waiting in the warm-up lane."""


@dataclass(frozen=True)
class _Terms:
    phase: Phase
    count: int
    version: int


class BoundedQueue:
    """The queue of one run.

    Args:
        capacity: trajectories it holds, leased ones included, before `put_group` waits; at least `batch`.
        batch: trajectories in a training step; a multiple of `group_size`.
        group_size: trajectories in a group.
        eta: versions a trained token may be behind the trainer.
        base_version: version at which reinforcement learning began.
        trained_steps: optimizer steps the trainer had taken, warm-up included, when this queue was made.
        demonstrations: capacity of the warm-up lane; 0 when there is no warm-up.
        recording: what sampled trajectories must carry.

    Raises:
        ConfigError: sizes with which no step could ever be leased.
    """

    def __init__(
        self,
        *,
        capacity: int,
        batch: int,
        group_size: int,
        eta: int,
        base_version: int = 0,
        trained_steps: int = 0,
        demonstrations: int = 0,
        recording: Recording = NOTHING,
    ) -> None:
        if batch % group_size:
            raise ConfigError("batch", got=batch, expected=f"a multiple of the group size {group_size}")
        if capacity < batch:
            raise ConfigError("queue.capacity", got=capacity, expected=f"at least one step's batch of {batch} trajectories")
        self.admission = Admission(batch, eta, base_version)
        trained = max(0, trained_steps - base_version) * batch
        self._ledger = Ledger(started=trained, trained=trained)
        self._group_size = group_size
        self._recording = recording
        self._lanes: dict[Phase, Lane] = {"rl": Lane(capacity), "warmup": Lane(demonstrations)}
        self._version = 0
        self._trained_steps, self._last_commit = trained_steps, -1
        self._arrivals = 0
        self._asked: dict[int, _Terms] = {}
        self._answers: dict[int, Leased] = {}
        self._dropped: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._stopping = False
        self._changes = Changes()

    # ------------------------------------------------------------ the producer's side

    @property
    def version(self) -> int:
        """Version the engines serve."""
        return self._version

    def set_version(self, version: int) -> None:
        """All engines now serve `version`."""
        if version < self._version:
            raise InvariantBroken(f"queue: version {version} after {self._version}")
        self._version = version
        self._changes.wake()

    def can_start(self, count: int) -> bool:
        """Whether a group of `count` may start now (capacity law)."""
        return self.admission.may_start(self._ledger, count, self._version)

    async def wait_can_start(self, count: int, wait_s: float | None = None) -> None:
        """Return once a group of `count` may start; call `started` before the next await, or another may take the place.

        Raises:
            WaitTimeout: `wait_s` seconds (None: no bound) were over.
            AsyncmoeError: what `fail` was called with.
        """
        if await self._changes.until(lambda: self.can_start(count) or None, wait_s) is None:
            raise WaitTimeout("the trainer", f"a new weight version after {self._version}", wait_s or 0.0)

    def started(self, count: int) -> None:
        """A group of `count` has started. InvariantBroken if it may not."""
        if not self.can_start(count):
            raise InvariantBroken(f"queue: {count} started against the capacity law at version {self._version}: {self._ledger}")
        self._ledger = self._ledger.start(count)

    def rejected(self, count: int, reason: str) -> None:
        """A started group of `count` will never be put; `reason` is the name it is counted under."""
        self._ledger = self._ledger.reject(count)
        self._rejected[reason] += count
        self._changes.wake()

    async def put_group(self, trajectories: Sequence[Trajectory], wait_s: float | None = None) -> None:
        """Queue a complete group that was `started`; waits while the queue is full. The arrays must not be changed afterwards.

        When it raises, the group is still counted as running: the caller counts it as `rejected`.

        Raises:
            TrajectoryRejected: a trajectory must not be trained on (`asyncmoe.validity.validate`), or carries no version.
            ConfigError: more trajectories than the queue holds.
            InvariantBroken: not one whole group of `group_size`, or a key that is already here.
            WaitTimeout: no space within `wait_s` seconds (None: no bound).
            AsyncmoeError: what `fail` was called with.
        """
        lane = self._lanes["rl"]
        if len(trajectories) > lane.capacity:
            raise ConfigError("queue.capacity", got=lane.capacity, expected=f"at least a group of {len(trajectories)} trajectories")
        groups = {t.group for t in trajectories}
        if len(trajectories) != self._group_size or len(groups) != 1:
            raise InvariantBroken(f"queue: put {len(trajectories)} trajectories of groups {groups}, expected {self._group_size} of one")
        for trajectory in trajectories:
            # An engine serves the next version a moment before all do.
            validate(trajectory, self._recording, newest_version=self._version + 1)
            if trajectory.oldest_version == NOT_SAMPLED:
                raise TrajectoryRejected("bad_version", f"{trajectory.key}: sampled tokens without a version")
        await self._insert("rl", self._pack(trajectories), wait_s)

    async def put_demonstrations(self, trajectories: Sequence[Trajectory], wait_s: float | None = None) -> None:
        """Queue demonstrations for the warm-up, each on its own; waits while that lane is full. They have no staleness.

        Raises:
            TrajectoryRejected: see `put_group`.
            ConfigError: the queue was made without a warm-up lane.
            WaitTimeout: no space within `wait_s` seconds (None: no bound).
        """
        if not self._lanes["warmup"].capacity:
            raise ConfigError("warmup.steps", got=0, expected="a warm-up, because there are demonstrations")
        for trajectory in trajectories:
            validate(trajectory, self._recording)
            await self._insert("warmup", self._pack([trajectory]), wait_s)

    # ------------------------------------------------------------ the trainer's side

    @property
    def trained_steps(self) -> int:
        """Optimizer steps taken: those before this queue was made and those committed since."""
        return self._trained_steps

    async def lease(self, step: int, phase: Phase, count: int, version: int, wait_s: float) -> Leased:
        """The batch of step `step`: whole groups, `count` trajectories in all, the oldest first.

        Groups with a token more than eta versions older than `version` are dropped first, under "stale". Any number of ranks may ask,
        at any time until the commit; they get the same answer. An answer without items (and `stop` false) means that `wait_s`
        (at most a day) was over: ask again.

        Raises:
            ProtocolError: the step was committed already, ranks disagree about the other arguments, or `count` is not whole groups.
            ConfigError: `count` could never be held.
            AsyncmoeError: what `fail` was called with.
        """
        terms = _Terms(phase, count, version)
        self._check_terms(step, terms, wait_s)
        answer = await self._changes.until(lambda: self._try_lease(step, terms), min(wait_s, MAX_LEASE_WAIT_S))
        return answer if answer is not None else self._answer(step, phase)

    def fetch(self, step: int, keys: Sequence[str], layers: Sequence[int] | None = None, masks: bool = True) -> list[Buffer]:
        """Encoded frames (`asyncmoe.trajectory.encode`) of leased trajectories, in the order of `keys`.

        Args:
            layers, masks: as for `asyncmoe.trajectory.part`.

        Raises:
            ProtocolError: `step` holds no lease, a key is not in it, or a trajectory has no routes of one of `layers`.
        """
        frames = self._lane_of(step).frames(step)
        unknown = [key for key in keys if key not in frames]
        if unknown:
            raise ProtocolError(f"fetch: {unknown[0]} is not leased to step {step}")
        return [frame for key in keys for frame in part(frames[key], layers, masks)]

    def commit(self, step: int) -> None:
        """Step `step` has been trained: its lease ends and its arrays are freed. Again is fine; steps commit in order.

        Raises:
            ProtocolError: `step` was never leased, or an earlier one is not committed yet.
        """
        if step <= self._last_commit:
            return
        lane = self._lane_of(step)
        earlier = [s for one in self._lanes.values() for s in one.leases if s < step]
        if earlier:
            raise ProtocolError(f"commit: step {step} before step {min(earlier)}")
        count = lane.commit(step)
        if lane is self._lanes["rl"]:
            self._ledger = self._ledger.train(count)
        self._last_commit = step
        self._trained_steps += 1
        self._end_lease(step)

    def release(self, step: int) -> None:
        """The lease of `step` ends untrained; its groups go back to their places. For a trainer that died.

        Raises:
            ProtocolError: `step` holds no lease.
        """
        lane = self._lane_of(step)
        count = lane.release(step)
        if lane is self._lanes["rl"]:
            self._ledger = self._ledger.release(count)
        self._end_lease(step)

    # ------------------------------------------------------------ the controller's side

    def stop(self) -> None:
        """Ask the trainer to stop: every lease that is not decided yet is answered with `stop`."""
        self._stopping = True
        self._changes.wake()

    def fail(self, error: AsyncmoeError) -> None:
        """No more trajectories will come: whoever waits, or would have to, gets `error`. What needs no waiting goes on."""
        self._changes.fail(error)

    @property
    def ledger(self) -> Ledger:
        """Where every trajectory is."""
        return self._ledger

    def stats(self) -> QueueStats:
        """Counts of this moment."""
        count = self._ledger
        return QueueStats(
            version=self._version,
            depth=count.queued,
            running=count.running,
            leased=count.leased,
            started=count.started,
            accepted=count.accepted,
            trained=count.trained,
            dropped=dict(self._dropped),
            rejected=dict(self._rejected),
            demonstrations=self._lanes["warmup"].depth,
        )

    # ------------------------------------------------------------ inside

    def _check_terms(self, step: int, terms: _Terms, wait_s: float) -> None:
        if not math.isfinite(wait_s) or terms.count <= 0:
            raise ProtocolError(
                f"lease of step {step}: got count {terms.count} and wait_s {wait_s}, expected a positive and a finite number"
            )
        if step <= self._last_commit:
            raise ProtocolError(f"lease of step {step}: it has been trained already, the last was {self._last_commit}")
        if self._asked.get(step, terms) != terms:
            raise ProtocolError(f"lease of step {step}: ranks disagree, {terms} after {self._asked[step]}")
        lane = self._lanes[terms.phase]
        if terms.phase == "rl" and terms.count % self._group_size:
            raise ProtocolError(f"lease of step {step}: got count {terms.count}, expected whole groups of {self._group_size}")
        if terms.count > lane.capacity:
            raise ConfigError(
                f"{terms.phase} lease", got=terms.count, expected=f"at most what the queue holds, {lane.capacity} trajectories"
            )
        if step not in self._answers and lane.leased + terms.count > lane.capacity:
            raise ProtocolError(
                f"lease of step {step}: {lane.leased} of {lane.capacity} are leased to steps {lane.leases}; commit those first"
            )
        self._asked[step] = terms

    def _try_lease(self, step: int, terms: _Terms) -> Leased | None:
        if step not in self._answers:
            if self._asked.get(step) != terms:
                raise ProtocolError(f"lease of step {step}: it was committed or released while it was asked for")
            if self._stopping:
                self._answers[step] = self._answer(step, terms.phase, stop=True)
            else:
                self._grant(step, terms)
        return self._answers.get(step)

    def _grant(self, step: int, terms: _Terms) -> None:
        lane = self._lanes[terms.phase]
        if terms.phase == "rl":
            stale = sum(map(len, lane.drop_older(self.admission.oldest_allowed(terms.version))))
            if stale:
                self._ledger = self._ledger.drop(stale)
                self._dropped["stale"] += stale
                self._changes.wake()
        groups = lane.lease(step, terms.count)
        if groups is None:
            return
        if terms.phase == "rl":
            self._ledger = self._ledger.lease(terms.count)
            newest = max(g.newest_version for g in groups)
            if newest > terms.version:
                raise InvariantBroken(f"lease of step {step}: a token of version {newest}, but the trainer is at {terms.version}")
        self._answers[step] = self._answer(step, terms.phase, groups)
        self._changes.wake()

    def _answer(self, step: int, phase: Phase, groups: Sequence[Group] = (), *, stop: bool = False) -> Leased:
        items = tuple(item for group in groups for item in group.items)
        return Leased(step, items, self._lanes[phase].depth, dict(self._dropped), stop)

    def _lane_of(self, step: int) -> Lane:
        for lane in self._lanes.values():
            if step in lane.leases:
                return lane
        raise ProtocolError(f"step {step} holds no lease")

    def _end_lease(self, step: int) -> None:
        del self._answers[step], self._asked[step]
        self._changes.wake()

    def _pack(self, trajectories: Sequence[Trajectory]) -> Group:
        self._arrivals += 1
        return pack(trajectories, self._arrivals)

    async def _insert(self, phase: Phase, group: Group, wait_s: float | None) -> None:
        lane = self._lanes[phase]
        lane.putting.append(group.arrival)
        try:
            fits = await self._changes.until(lambda: (lane.putting[0] == group.arrival and lane.fits(len(group))) or None, wait_s)
            if fits is None:
                raise WaitTimeout("the trainer", f"space in the queue, which holds {lane.capacity} trajectories", wait_s or 0.0)
            lane.insert(group)
            if phase == "rl":
                self._ledger = self._ledger.accept(len(group))
        finally:
            lane.putting.remove(group.arrival)
            self._changes.wake()
