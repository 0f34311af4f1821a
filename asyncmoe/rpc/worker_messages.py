"""Messages between the controller and its rollout workers (`asyncmoe.rollout.workers`).

A worker joins with `WorkerJoin`. From then on the controller sends requests and the worker replies: each episode is a request, and its data
stays in the worker until the episode is over. Trainer ranks fetch from the worker with `WorkerFetch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from asyncmoe.log.log import Number, Place
from asyncmoe.log.turns import EpisodeId
from asyncmoe.rpc.base import Count, Message
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.peers import Facts
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.telemetry.rollout_schema import Calls, Scoring

LOST = "worker_lost"
"""Reason for a rejection: the worker that ran the episode is gone."""


class WorkerEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine to which a worker sends requests."""

    name: str
    serial: Count
    """`asyncmoe.engines.member.Member.serial`: changes when the engine restarts."""
    url: str
    key: str
    version: Count
    lineage: Count
    suspect: bool = False
    waiting: bool = False
    """It has no version yet, so it gets no requests. An engine that is `leaving` gets none either."""
    leaving: bool = False


class EngineUse(msgspec.Struct, frozen=True, array_like=True):
    """A worker's report about an engine.

    Attributes:
        serial: as in `WorkerEngine`.
        heard_s: seconds since it last answered; None: it never has.
        failed: why the worker no longer uses it; empty: the worker does.
    """

    serial: Count
    in_flight: Count
    heard_s: float | None = None
    failed: str = ""


Busy = tuple[str, float, float]
"""An engine's name, and begin and end (Unix seconds) of an interval in which it was generating."""


# ---------------------------------------------------------------- to the controller


class WorkerJoin(Message, frozen=True):
    """A worker is ready to serve."""

    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    rendezvous: Rendezvous
    config_digest: str
    facts: Facts | None = None


# ---------------------------------------------------------------- to a worker


class WorkerBegin(Message, frozen=True):
    """First message: the run's log, and the unfinished groups. Until it arrives, the worker has not opened its logs."""

    log: str
    """Random name of the run's log."""
    under_way: dict[int, int] = msgspec.field(default_factory=dict)
    """Attempts, by group number, of the groups whose answers an earlier worker may have recorded."""
    first: bool = False
    """Nobody has yet tested whether the run's scorer and answers are usable."""


class WorkerEngines(Message, frozen=True):
    """The engines from now on, and whether requests may go to them. Answered with `WorkerNews`, once the gate is set accordingly."""

    engines: tuple[WorkerEngine, ...]
    open: bool


class WorkerRun(Message, frozen=True):
    """Run and score an episode. Answered with `WorkerRan` once it has ended; the data of a training episode stays in the worker."""

    episode: EpisodeId
    prompt: bytes
    """The prompt, encoded by `asyncmoe.rollout.tasks.types.to_bytes`."""
    evaluation: str | None = None
    """Name of the evaluation set that needs the episode; None: training."""


class WorkerShow(Message, frozen=True):
    """Make warm-up demonstrations, `count` from number `first` on, and write them to the log. Answered with `WorkerPacked`: one group for
    each trajectory."""

    first: Count
    count: Count


class WorkerForget(Message, frozen=True):
    """End and forget episodes whose outcome nobody needs any more, running or ended; forget all data of groups; and free payloads."""

    episodes: tuple[EpisodeId, ...] = ()
    groups: tuple[Count, ...] = ()
    needed: dict[int, Number] | None = None
    """By worker number, the position before which payloads are freed, unless the worker has their groups; None: free none."""


class WorkerPack(Message, frozen=True):
    """Make a complete, checked group of these episodes, and write it to the log. Answered with `WorkerPacked`."""

    episodes: tuple[EpisodeId, ...]
    newest: Count
    """Newest version that may have sampled a token."""


class WorkerAsk(Message, frozen=True):
    """Ask for the worker's reports about its engines, and its statistics. Answered with `WorkerNews` a little later."""


class WorkerFetch(Message, frozen=True):
    """Request trajectories that the worker has, or that it can read from the log."""

    places: dict[str, Place]
    """By the trajectory's key, the place of its group in the log."""
    layers: tuple[Count, ...] | None = None
    """Send only the routes of these layers; None: of all layers."""
    masks: bool = True
    """Send sampling masks."""


class WorkerEnd(Message, frozen=True):
    """The run is over: the worker ends."""


# ---------------------------------------------------------------- replies of a worker


class WorkerBegun(Message, frozen=True):
    """Reply to `WorkerBegin`: groups for which this worker has recorded answers."""

    groups: tuple[Count, ...]


class PackedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group in the log: an `asyncmoe.queue.group_buffer.Group` without its frames, before its arrival."""

    items: tuple[Item, ...]
    attempt: Count
    place: Place | None


class WorkerPacked(Message, frozen=True):
    """Reply to `WorkerPack` and `WorkerShow`."""

    groups: tuple[PackedGroup, ...]


class Made(msgspec.Struct, frozen=True, array_like=True):
    """The controller's metadata of a trajectory before it is part of a group.

    Attributes:
        agent, reward: as in `asyncmoe.trajectory.Trajectory`.
        sampled: number of sampled tokens; set only for an evaluation, as are all fields below.
        oldest, newest: versions of its oldest and newest tokens.
        truncated: it ended at its limit of tokens.
        metrics: as in `Trajectory`.
    """

    agent: int
    reward: float
    sampled: int = 0
    oldest: int = 0
    newest: int = 0
    truncated: bool = False
    metrics: Mapping[str, float] = {}


class WorkerRan(Message, frozen=True):
    """Reply to `WorkerRun`: the trajectories, or why the episode was rejected."""

    made: tuple[Made, ...] = ()
    reason: str = ""
    detail: str = ""
    sampled: bytes = b""
    """For a group stored for inspection: encoded by `asyncmoe.rollout.sampled_episodes.to_bytes`."""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statistics of scorers and tools, which run in each worker: by scoring stage, and by tool."""

    scoring: dict[str, Scoring] = msgspec.field(default_factory=dict)
    tools: dict[str, Calls] = msgspec.field(default_factory=dict)


class WorkerNews(Message, frozen=True):
    """Reply to `WorkerAsk` and `WorkerEngines`."""

    uses: tuple[EngineUse, ...]
    busy: tuple[Busy, ...]
    """Since the previous news."""
    tokens: dict[str, int]
    """Since the previous news, by the attribute of `asyncmoe.engines.pool.Pool` that counts them."""
    figures: Figures


WorkerRequest = WorkerBegin | WorkerEngines | WorkerRun | WorkerShow | WorkerForget | WorkerPack | WorkerAsk | WorkerFetch | WorkerEnd
WorkerReply = WorkerBegun | WorkerRan | WorkerPacked | WorkerNews
