"""Messages between the controller and its rollout workers (`asyncmoe.rollout.workers`).

A worker joins with `WorkerJoin`. From then on the controller asks and the worker answers: each episode is a request, and what it brings
stays in the worker until it is over. Trainer ranks fetch from the worker with `WorkerFetch`.
"""

from __future__ import annotations

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
"""Reason of a rejection: the worker that ran the episode is gone."""


class WorkerEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that a worker sends requests to."""

    name: str
    serial: Count
    """`asyncmoe.engines.member.Member.serial`: another one once the engine has started again."""
    url: str
    key: str
    version: Count
    lineage: Count
    suspect: bool = False
    waiting: bool = False
    """It gets no requests until it has a version, nor if it is `leaving`."""
    leaving: bool = False


class EngineUse(msgspec.Struct, frozen=True, array_like=True):
    """What a worker knows of an engine.

    Attributes:
        serial: as in `WorkerEngine`.
        heard_s: seconds since it last answered; None: it never has.
        failed: why the worker does not use it any more; empty: it does.
    """

    serial: Count
    in_flight: Count
    heard_s: float | None = None
    failed: str = ""


Busy = tuple[str, float, float]
"""An engine's name and the begin and end, Unix seconds, of an interval in which it was generating."""


# ---------------------------------------------------------------- to the controller


class WorkerJoin(Message, frozen=True):
    """A worker serves."""

    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    rendezvous: Rendezvous
    config_digest: str
    facts: Facts | None = None


# ---------------------------------------------------------------- to a worker


class WorkerBegin(Message, frozen=True):
    """First message: what the run's log is, and which groups are under way. Before it the worker has loaded nothing."""

    log: str
    """Random name of the run's log."""
    under_way: dict[int, int] = msgspec.field(default_factory=dict)
    """Attempts, by number, of the groups whose answers a worker before this one may have recorded."""
    first: bool = False
    """Nobody has tried yet whether the run's scorer and answers can be used."""


class WorkerEngines(Message, frozen=True):
    """The engines from now on, and whether requests may go to them. Answered with `WorkerNews`, once the gate is so."""

    engines: tuple[WorkerEngine, ...]
    open: bool


class WorkerRun(Message, frozen=True):
    """Run and score an episode. Answered with `WorkerRan` once it has ended; what one of training brings stays in the worker."""

    episode: EpisodeId
    prompt: bytes
    """Of `asyncmoe.rollout.tasks.types.to_bytes`."""
    evaluation: str | None = None
    """Name of the evaluation set that asks; None: training does."""


class WorkerShow(Message, frozen=True):
    """Make demonstrations of the warm-up, `count` from number `first` on, and put them into the log. Answered with `WorkerPacked`: a group
    of one for each trajectory."""

    first: Count
    count: Count


class WorkerForget(Message, frozen=True):
    """End and forget episodes whose outcome nobody wants any more, whether they run or have ended; forget all that is kept of groups; and
    let go of payloads."""

    episodes: tuple[EpisodeId, ...] = ()
    groups: tuple[Count, ...] = ()
    needed: dict[int, Number] | None = None
    """Payloads before this position are let go of, by number of the worker, unless it holds their groups; None: none are."""


class WorkerPack(Message, frozen=True):
    """Make a group of these episodes, whole and checked, and put it into the log. Answered with `WorkerPacked`."""

    episodes: tuple[EpisodeId, ...]
    newest: Count
    """Newest version that may have sampled a token."""


class WorkerAsk(Message, frozen=True):
    """Ask what the worker knows of its engines, and its statistics. Answered with `WorkerNews` a little later."""


class WorkerFetch(Message, frozen=True):
    """Request trajectories that the worker holds, or that it can read from the log."""

    keys: tuple[str, ...]
    places: tuple[Place, ...]
    """Where the log has each one's group."""
    layers: tuple[Count, ...] | None = None
    """Send only the routes of these layers; None: of all layers."""
    masks: bool = True
    """Send sampling masks."""


class WorkerEnd(Message, frozen=True):
    """The run is over: the worker ends."""


# ---------------------------------------------------------------- replies of a worker


class WorkerBegun(Message, frozen=True):
    """Reply to `WorkerBegin`: groups of which this worker has recorded answers."""

    groups: tuple[Count, ...]


class PackedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that is in the log: an `asyncmoe.queue.group_buffer.Group` without its frames, and before it has arrived."""

    items: tuple[Item, ...]
    attempt: Count
    place: Place | None


class WorkerPacked(Message, frozen=True):
    """Reply to `WorkerPack` and `WorkerShow`."""

    groups: tuple[PackedGroup, ...]


class Made(msgspec.Struct, frozen=True, array_like=True):
    """What the controller needs to know of a trajectory before it is part of a group.

    Attributes:
        agent, reward: as in `asyncmoe.trajectory.Trajectory`.
        sampled: number of sampled tokens; of an evaluation, like the next two.
        oldest, newest: their versions.
    """

    agent: int
    reward: float
    sampled: int = 0
    oldest: int = 0
    newest: int = 0


class WorkerRan(Message, frozen=True):
    """Reply to `WorkerRun`: the trajectories, or why the episode was rejected."""

    made: tuple[Made, ...] = ()
    reason: str = ""
    detail: str = ""
    sampled: bytes = b""
    """Of a group that is kept to be read: `asyncmoe.rollout.sampled_episodes.to_bytes`."""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statistics of scorers and tools, which run in each worker: by the name of a stage of scoring, and by that of a tool."""

    scoring: dict[str, Scoring] = msgspec.field(default_factory=dict)
    tools: dict[str, Calls] = msgspec.field(default_factory=dict)


class WorkerNews(Message, frozen=True):
    """Reply to `WorkerAsk` and `WorkerEngines`."""

    uses: tuple[EngineUse, ...]
    busy: tuple[Busy, ...]
    """Since the news before."""
    tokens: dict[str, int]
    """Since the news before, by the attribute of `asyncmoe.engines.pool.Pool` that counts them."""
    figures: Figures


WorkerRequest = WorkerBegin | WorkerEngines | WorkerRun | WorkerShow | WorkerForget | WorkerPack | WorkerAsk | WorkerFetch | WorkerEnd
WorkerReply = WorkerBegun | WorkerRan | WorkerPacked | WorkerNews
