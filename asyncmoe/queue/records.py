"""The records of a run's log: msgpack maps with a tag, each with the queue's ledger after the change.

Each record is self-contained, so that damage loses no more than the records it hits.
"""

from __future__ import annotations

import msgspec

from asyncmoe.log.log import Place
from asyncmoe.queue.accounts import Accounts


class _Record(msgspec.Struct, frozen=True, tag=lambda name: name.lower(), forbid_unknown_fields=True):
    pass


class RunStands(_Record, frozen=True):
    """The state of the run; older records are forgotten.

    Attributes:
        first: step from which on all leases are known.
        next: number of the first group never begun.
        history: number of restarts after which steps were trained again with other weights.
        since: position of the oldest record still needed.
        again: leases from this step on are granted again; None: none are.
    """

    first: int
    next: int
    history: int
    since: int = 0
    again: int | None = None


class Start(_Record, frozen=True, tag="grouppending"):
    """A group is not finished: sampling of this attempt begins, or is to begin.

    Attributes:
        number: number of the prompt; the same number asks the same question.
        attempt: number of times the group was started before.
        failures: number of these starts that failed since the group was last complete.
    """

    number: int
    attempt: int = 0
    failures: int = 0


class GroupFinished(_Record, frozen=True):
    """A group is finished; its payload is durable. `arrival`: its index in the order of arrivals."""

    number: int
    arrival: int
    attempt: int
    episodes: int
    place: Place


class GroupEnded(_Record, frozen=True):
    """A group is dropped or rejected, and does not start again."""

    number: int


class LeasedGroup(msgspec.Struct, frozen=True):
    """A group in a lease: the factor on its weight, the keys of its trajectories in order, and fields as in `GroupFinished`.

    Attributes:
        order: its arrival number.
    """

    number: int
    weight: float
    keys: tuple[str, ...]
    order: int
    episodes: int
    place: Place


class StepLeased(_Record, frozen=True):
    """The complete batch of a step.

    Attributes:
        count: number of episodes.
        version: the trainer's version.
        history: `RunStands.history` when the batch was first leased.
        groups: in training order.
    """

    step: int
    count: int
    version: int
    history: int
    groups: tuple[LeasedGroup, ...]


class StepCommitted(_Record, frozen=True):
    """A step is over: the trainer trained on its groups, or skipped them for a reason."""

    step: int
    skipped: str
    groups: tuple[int, ...]


class StepReleased(_Record, frozen=True):
    """A lease ends untrained: its groups are queued again."""

    step: int


Change = RunStands | Start | GroupFinished | GroupEnded | StepLeased | StepCommitted | StepReleased


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """A record of the controller's log. `accounts`: the queue's accounts after the change."""

    change: Change
    accounts: Accounts | None = None


encode = msgspec.msgpack.Encoder().encode
entry = msgspec.msgpack.Decoder(LogEntry).decode
