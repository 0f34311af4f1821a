"""What an earlier process left to the queue, and the leases of a trainer that is lost, which are read from disk only when the next trainer
asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncmoe.errors import DataError
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.leases import LeaseTerms
from asyncmoe.queue.queue_log import QueueLog
from asyncmoe.queue.start_order import Start

Hold = Callable[[int, tuple[Group, ...], Sequence[float], bool], None]
"""Takes the step, the groups and the factors on their weights of a lease that is granted again, and whether it was trained before."""


@dataclass(frozen=True)
class Resumption:
    """The state in which a queue begins.

    Attributes:
        accounts: none running; None: nothing was left.
        queued: groups to queue, by arrival.
        starts: groups to start before any new one.
        arrivals: number of the newest arrival.
        log: holds the leases that are granted again; None: there are none.
        served: newest version that an earlier process may have published.
    """

    accounts: Accounts | None = None
    queued: Sequence[Group] = ()
    starts: Sequence[Start] = ()
    arrivals: int = 0
    log: QueueLog | None = None
    served: int = 0
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def holds(self, step: int) -> bool:
        """Whether the lease of a step is still to be read."""
        return self.log is not None and step in self.log.replays

    async def load(self, step: int, terms: LeaseTerms, hold: Hold) -> None:
        """Grant the lease of a step again if an earlier trainer was granted it. Any number of ranks may ask at the same time.

        Raises:
            DataError: the trainer asks for other terms than then, or a payload is damaged.
        """
        log = self.log
        if log is None or log.replays.get(step) is None:
            return
        async with self._reading:
            if (lease := log.replays.get(step)) is None:
                return
            if (terms.count, terms.version) != (lease.count, lease.version):
                got = f"{terms.count} episodes at version {terms.version}"
                expected = f"{lease.count} at version {lease.version}, as when it was leased first"
                raise DataError(f"{log.name}: lease of step {step}", got=got, expected=expected)
            history, groups = log.history, await log.groups(lease.groups)
            for group, one in zip(groups, lease.groups, strict=True):
                if tuple(item.key for item in group.items) != one.keys:
                    got = f"other trajectories in group {one.number}"
                    raise DataError(f"{log.name}: lease of step {step}", got=got, expected=f"{one.keys}")
            if (log.history, log.replays.get(step)) != (history, lease):
                return  # the trainer that asked is lost, and the leases of the next one are others
            del log.replays[step]
            hold(step, groups, [one.weight for one in lease.groups], lease.history < log.history)


UNDISTURBED = Resumption()
"""Nothing was left."""
