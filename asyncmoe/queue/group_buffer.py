"""Ordered, bounded storage of complete groups, queued and leased. No waiting, no policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from asyncmoe.errors import InvariantBroken, TrajectoryRejected
from asyncmoe.log.log import Place
from asyncmoe.rpc.item import Item
from asyncmoe.trajectory import NOT_SAMPLED, Buffer, Recording, Trajectory, encode, validate

Frames = dict[str, list[Buffer]]
"""The encoded trajectories of a group by key; only the rollout worker that stores them has these."""


@dataclass(frozen=True)
class Group:
    """Episodes that are leased and dropped together, encoded once on arrival.

    An episode has one trajectory of each agent that spoke, or one for each path of the agent's tree. All counts, here and in the queue, are
    numbers of episodes.
    """

    arrival: int
    items: tuple[Item, ...]
    attempt: int = 0
    """Highest attempt of its trajectories: the number of times the group or one of its episodes was restarted."""
    place: Place | None = None
    """Where its payload already lies in the log."""

    def __len__(self) -> int:
        return self._episodes

    @cached_property
    def _episodes(self) -> int:
        return len({item.episode for item in self.items})

    @property
    def number(self) -> int:
        """Number of its prompt."""
        return self.items[0].group

    @cached_property
    def keys(self) -> frozenset[str]:
        """The names of its trajectories."""
        return frozenset(item.key for item in self.items)

    @cached_property
    def oldest_version(self) -> int:
        return min(item.oldest_version for item in self.items)

    @property
    def newest_version(self) -> int:
        return max(item.newest_version for item in self.items)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: oldest version first, then arrival."""
        return self.oldest_version, self.arrival


def describe(t: Trajectory) -> Item:
    """Return the metadata that every rank receives about a trajectory, whether or not the rank fetches it."""
    steps, mean, squares = _moments(t.rewards)
    return Item(
        key=t.key,
        group=t.group,
        episode=t.episode,
        agent=t.agent,
        tokens=len(t),
        sampled=int(t.loss_mask.sum()),
        reward=float(t.reward),
        oldest_version=t.oldest_version,
        newest_version=int(t.versions.max()),
        steps=steps,
        step_mean=mean,
        step_squares=squares,
        teacher_gap=None if t.teacher is None else float((t.logprobs.astype(np.float64) - t.teacher)[t.loss_mask].sum()),
        branch=t.branch,
        parent=t.parent,
        forked=t.forked,
        truncated=t.finish == "length",
        metrics=t.metrics,
    )


def _moments(rewards: np.ndarray | None) -> tuple[int, float, float]:
    """Return count, mean and sum of squared deviations of the values that are not NaN."""
    values = np.zeros(0) if rewards is None else rewards[~np.isnan(rewards)].astype(np.float64)
    if not len(values):
        return 0, 0.0, 0.0
    return len(values), float(values.mean()), float(((values - values.mean()) ** 2).sum())


def weighed(group: Group, weight: float) -> Sequence[Item]:
    """Return a group's items with the group's place, and with `weight` as the factor on their weight."""
    return [msgspec.structs.replace(item, weight=weight, place=group.place) for item in group.items]


def pack(trajectories: Sequence[Trajectory]) -> tuple[Group, Frames]:
    """Describe and encode trajectories. Does not copy the arrays: their owner must not change them afterwards."""
    group = Group(0, tuple(map(describe, trajectories)), max(t.attempt for t in trajectories))
    return group, {t.key: encode(t) for t in trajectories}


def whole(trajectories: Sequence[Trajectory], group_size: int, recording: Recording, newest_version: int) -> tuple[Group, Frames]:
    """Return a complete group of sampled trajectories, fit for the queue, and its frames.

    Args:
        group_size: number of its episodes.
        recording: data that each trajectory must carry.
        newest_version: newest version that may have sampled a token.

    Raises:
        TrajectoryRejected: a trajectory is unfit for training (`asyncmoe.trajectory.validate`), or has no version.
        InvariantBroken: they are not one complete group.
    """
    groups, episodes = {t.group for t in trajectories}, {t.episode for t in trajectories}
    if len(episodes) != group_size or len(groups) != 1:
        raise InvariantBroken(f"queue: put {len(episodes)} episodes of groups {groups}, expected {group_size} of one group")
    for trajectory in trajectories:
        validate(trajectory, recording, newest_version=newest_version)
        if trajectory.oldest_version == NOT_SAMPLED:
            raise TrajectoryRejected("bad_version", f"{trajectory.key}: sampled tokens without a version")
    return pack(trajectories)


class GroupBuffer:
    """Groups in training order; at most `capacity` episodes, leased ones included.

    Args:
        freed: called with deleted groups.

    Attributes:
        depth: number of episodes not yet leased.
        leased: number of leased, uncommitted episodes.
    """

    def __init__(self, capacity: int, freed: Callable[[Sequence[Group]], None] = lambda _: None) -> None:
        self.capacity, self._freed = capacity, freed
        self.putting: deque[int] = deque()
        """Arrival numbers of groups that wait for space, in order of arrival."""
        self._queued: list[Group] = []
        self._leased: dict[int, tuple[Group, ...]] = {}
        self._known: set[str] = set()
        """The keys of all groups."""
        self.depth = self.leased = 0

    def fits(self, count: int) -> bool:
        """Return whether `count` more episodes fit into the capacity."""
        return self.depth + self.leased + count <= self.capacity

    def insert(self, group: Group) -> None:
        """Add a group. Raises InvariantBroken for a duplicate key."""
        self._know(group)
        insort(self._queued, group, key=lambda g: g.order)
        self.depth += len(group)

    def drop_older(self, than: int) -> list[Group]:
        """Remove and return the queued groups whose oldest token is older than version `than`."""
        cut = bisect_left(self._queued, than, key=lambda g: g.oldest_version)
        dropped, self._queued = self._queued[:cut], self._queued[cut:]
        self._forget(dropped)
        self.depth -= sum(map(len, dropped))
        return dropped

    def lease(self, step: int, count: int) -> tuple[Group, ...] | None:
        """Lease the first groups, `count` episodes in all; None if too few are queued."""
        total = taken = 0
        while total < count and taken < len(self._queued):
            total += len(self._queued[taken])
            taken += 1
        if total != count:
            return None
        groups = tuple(self._queued[:taken])
        self._queued = self._queued[len(groups) :]
        self.depth -= count
        self._hold(step, groups)
        return groups

    def hold(self, step: int, groups: tuple[Group, ...]) -> None:
        """Add the groups of a lease that an earlier process granted. Raises InvariantBroken for a duplicate key."""
        for group in groups:
            self._know(group)
        self._hold(step, groups)

    def commit(self, step: int) -> tuple[Group, ...]:
        """Delete and return the groups of a lease."""
        groups = self._leased.pop(step)
        self.leased -= sum(map(len, groups))
        self._forget(groups)
        return groups

    def forget_leases(self) -> None:
        """Delete the groups of all leases."""
        for step in tuple(self._leased):
            self.commit(step)

    def clear(self) -> None:
        """Delete all groups."""
        self._freed(self.all)
        self._queued, self._leased, self._known = [], {}, set()
        self.depth = self.leased = 0

    @property
    def all(self) -> list[Group]:
        """All groups, queued and leased."""
        return [*self._queued, *(group for groups in self._leased.values() for group in groups)]

    def _hold(self, step: int, groups: tuple[Group, ...]) -> None:
        self._leased[step] = groups
        self.leased += sum(map(len, groups))

    def _know(self, group: Group) -> None:
        known = self._known & group.keys
        if known or len(group.keys) != len(group.items):
            raise InvariantBroken(f"queue: trajectory {min(known, default=group.items[0].key)} was put twice")
        self._known |= group.keys

    def _forget(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._known -= group.keys
        self._freed(groups)
