"""All messages of the queue protocol, the weight protocol and engine membership.

Trainer ranks and engines send requests, the controller replies; each request has exactly one reply. Messages are msgpack (msgspec tagged
structs); trajectories follow a `Fetched` reply as raw frames (`asyncmoe.trajectory.encode`).

The trainer's step identifies a lease, so the request is idempotent: every rank requests the lease of step k and gets the same reply,
without a collective among the ranks.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from asyncmoe.log.log import Number
from asyncmoe.occupancy import DeviceTurn, Event
from asyncmoe.rpc.base import Count, Message, Wait
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.node_messages import EngineNode, EngineNodeEnd, EngineNodes
from asyncmoe.rpc.peers import Facts
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.worker_messages import WorkerJoin, WorkerReply, WorkerRequest

Phase = Literal["warmup", "rl"]
MAX_PROBED = 1 << 16
"""Maximum number of tokens in a probe, over all texts."""
_PROBED = msgspec.Meta(max_length=MAX_PROBED)


class TrainerMessage(Message, frozen=True, kw_only=True):
    """Base of the trainer's requests.

    A lost trainer may be restarted in place, while controller and engines live on. It then has the next epoch, and the controller refuses
    the requests of older epochs: a rank that was only suspended changes nothing when it wakes up.
    """

    epoch: Count = 0
    """Number of times the trainer was restarted in place; set by `asyncmoe.rpc.client.Client`."""


# ---------------------------------------------------------------- requests: queue


class Hello(TrainerMessage, frozen=True):
    """First message of every rank. The controller refuses a trainer with a different configuration."""

    rank: Count
    world: Count
    config_digest: str
    step: Count
    """Optimizer steps the trainer has already taken (not 0 after a resume)."""
    facts: Facts | None = None
    """Facts about the rank's process, if it may run on another machine."""
    without_layout: str = ""
    """`Config.digest_without_layout`: a trainer restarted in place may have another parallel layout."""
    same: bool = False
    """Whether steps that were trained after `step` before are trained again with the same bits, so that their weights are not lost."""


class Lease(TrainerMessage, frozen=True):
    """Request the batch of step `step`. Waits until the batch is complete or `wait_s` expires."""

    step: Count
    phase: Phase
    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    version: Count
    """The trainer's current version; the consumption rule measures age from it."""
    wait_s: Wait


class FindWorker(TrainerMessage, frozen=True):
    """Ask for the rollout worker that serves what `writer` wrote; if it is lost, wait for a replacement, for at most `wait_s`."""

    writer: Number
    wait_s: Wait


class Commit(TrainerMessage, frozen=True):
    """The trainer has trained on the batch of step `step`; its lease ends."""

    step: Count
    dropped: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """Why the trainer left the whole batch untrained; the batch counts as dropped under this reason."""


class Probe(Message, frozen=True):
    """The trainer's log-probabilities of some texts."""

    tokens: Annotated[tuple[Annotated[tuple[Count, ...], _PROBED], ...], _PROBED]
    logprobs: Annotated[tuple[Annotated[tuple[float, ...], _PROBED], ...], _PROBED]
    """Log-probability of each token given those before it, at temperature 1 over the whole vocabulary; 0 for the first token."""


class Saved(TrainerMessage, frozen=True):
    """A checkpoint covers every step up to and including `step`."""

    step: Count


class Evaluations(TrainerMessage, frozen=True):
    """Ask for the evaluation of the last version. Waits until it has ended, or `wait_s` expires."""

    version: Count
    wait_s: Wait


class Goodbye(TrainerMessage, frozen=True):
    """A rank of the trainer leaves: all steps are done (`finished`), or the trainer stops early and will resume."""

    rank: Count
    finished: bool


class TurnAwaited(TrainerMessage, frozen=True):
    """Trainer and engines use the same devices in turn, and the trainer waits for a state; it holds no more memory than that allows."""

    turn: DeviceTurn
    event: Event | None = None
    """What the trainer says first: it has started, or given up memory that it could have kept."""


# ---------------------------------------------------------------- requests: weights


class WeightsLoaded(TrainerMessage, frozen=True):
    """Compare the weights that all engines loaded from the model's files with the trainer's, once the engines have started."""

    checksums: tuple[dict[str, str], ...] = ()
    """As in `WeightsCommit`."""
    probe: Probe | None = None
    """Compared instead of checksums if engines have rounded versions of the trainer's weights."""
    first: bool = False
    """The weights are the trainer's version: engines may sample from now on, before they receive one."""
    kept: bool = False
    """Engines keep these weights, because only adapters are trained: engines that join later are compared too."""


class WeightsJoin(TrainerMessage, frozen=True):
    """All engines join the process group for weight transfer, whose first ranks are the trainer's `senders` ranks.

    Method "broadcast": the trainer's rank 0 joins while this request is open. Method "reshard": the engines' receivers start and meet
    the sender at this address. On one machine `host` is the path of a file, and `port` 0 (`asyncmoe.weights.receiver.hosting`).
    """

    host: str
    port: Count
    group: str
    backend: Literal["gloo", "nccl"]
    method: Literal["broadcast", "reshard"] = "broadcast"
    senders: Count = 1


class WeightsStage(TrainerMessage, frozen=True):
    """Open an update whose weights go to the engines' receivers; `WeightsCommit` completes it.

    The weights go into staging memory while the engines generate, or, with `in_place`, directly into the parameters of the engines, which
    are paused from this request on.
    """

    version: Count
    in_place: bool = False


class WeightsBegin(TrainerMessage, frozen=True):
    """Pause all engines in place and open an update."""

    version: Count


class WeightsBucket(TrainerMessage, frozen=True):
    """One flattened bucket: the bytes of `names`, concatenated. The sender broadcasts it while this request is open."""

    version: Count
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """torch's names without the prefix: "float32", "bfloat16"."""
    shapes: tuple[tuple[Count, ...], ...]


class WeightsCommit(TrainerMessage, frozen=True):
    """Close the update, publish `version` and resume the engines.

    `checksums` (optional) maps an engine rank to {SGLang parameter: checksum}; an engine resumes only if its checksums agree.
    `update`: after `WeightsStage`, the number of the update that all receivers reported as received.
    """

    version: Count
    checksums: tuple[dict[str, str], ...] = ()
    update: Count = 0


class WeightsFiles(TrainerMessage, frozen=True):
    """Every engine pauses, loads the Hugging Face checkpoint in `folder` as `version`, and resumes; `checksums` as in `WeightsCommit`."""

    version: Count
    folder: str
    checksums: tuple[dict[str, str], ...] = ()


class WeightsAbort(TrainerMessage, frozen=True):
    """The sender failed: fence the engines if they may have part of `version`."""

    version: Count
    why: str


class EnginesAsk(TrainerMessage, frozen=True):
    """Request the current engines, which become the roster. Waits until the run's engines have started, or `wait_s` expires."""

    wait_s: Wait
    probe: bool = False
    """Have the roster's engines show that they generate; one whose server is gone is fenced."""


# ---------------------------------------------------------------- requests: engines


class EngineJoin(Message, frozen=True):
    """An engine that accepts requests asks to join the run. It receives its first requests with the next version."""

    name: str
    url: str
    """"http://10.1.0.3:30000"."""
    key: str
    """API key that the engine's server requires."""
    host: str
    """`asyncmoe.rpc.address.host_id` of the engine's machine."""
    tp: Count
    ep: Count
    config_digest: str
    facts: Facts | None = None
    served: str = ""
    """Name of the controller that this server joined before (`EngineJoined.controller`); empty if the server has just started."""
    nodes: Count = 1
    """Number of machines over which its ranks are spread."""
    met: str = ""
    """Where the ranks meet, if there are several machines (`EngineNodes.meeting`)."""
    pid: Count = 0
    """Id of the server's process group, if the controller must see it end: its devices are used in turn."""


class EngineStarts(Message, frozen=True):
    """An engine that uses the trainer's devices in turn asks to start. Answered once it may, and until it joins no other turn
    begins; or after `wait_s` (`Done`)."""

    name: str
    wait_s: Wait


class EngineAlive(Message, frozen=True):
    """Heartbeat of an engine. Answered once there is an order for the engine, or after `wait_s`."""

    name: str
    wait_s: Wait


class EngineLeave(Message, frozen=True):
    """An engine asks to leave; answered once it is drained. With `why`, the engine is already dead."""

    name: str
    why: str = ""


# ---------------------------------------------------------------- replies


class Welcome(Message, frozen=True):
    """Reply to `Hello`."""

    version: Count = 0
    """Version that the engines serve. It exceeds the trainer's step if a lost trainer had got further than its checkpoint."""


class Leased(Message, frozen=True):
    """Reply to `Lease`; `items` is empty if `wait_s` expired first."""

    step: int
    items: tuple[Item, ...]
    queue_depth: int
    dropped: dict[str, int]
    """Trajectories dropped so far, by reason."""
    stop: bool = False
    """The run stops here and resumes later: save a checkpoint and send `Goodbye`. All ranks get the same answer for a step."""
    lineage: int = 0
    """Number of restarts so far that trained steps again with other weights, as the log counts them."""
    replayed: bool = False
    """An earlier trainer was granted this batch for this step: it is leased again unchanged."""


class Evaluated(Message, frozen=True):
    """Reply to `Evaluations`: whether the version's evaluation is known, and whether there is nothing left to wait for."""

    known: bool
    ended: bool


class Fetched(Message, frozen=True):
    """Reply to `WorkerFetch`; `frames_in(len(places))` frames follow, in the order of its places."""


class WorkerFound(Message, frozen=True):
    """Reply to `FindWorker`. `rendezvous` is None if the worker is lost and none has replaced it yet."""

    rendezvous: Rendezvous | None = None


class EngineInfo(Message, frozen=True):
    """One engine; its ranks are `rank_offset .. rank_offset + tp - 1` of the weight group."""

    name: str
    tp: int
    ep: int
    rank_offset: int
    version: int
    host: str = ""
    """`asyncmoe.rpc.address.host_id` of the engine's machine."""
    waiting: bool = False
    """It generates nothing, because it has joined or restarted since the last version."""


class Engines(Message, frozen=True):
    """Reply to `EnginesAsk`; `world` is the size of the weight group, including the sender."""

    engines: tuple[EngineInfo, ...]
    world: int
    roster: int
    """Number of the roster; changes whenever the set of engines changes."""
    lost: tuple[str, ...] = ()
    """Dead or fenced engines of the open update, or, without an open update, of the previous roster."""
    awaited: bool = False
    """There is no engine, but one will come back: ask again."""
    silent: bool = False
    """An engine has not shown that it generates, so its machine may be lost: ask again."""


class EngineJoined(Message, frozen=True):
    """Reply to `EngineJoin`."""

    controller: str = ""
    """Name of this controller; empty if no other can replace it."""


class EngineOrder(Message, frozen=True):
    """Reply to `EngineAlive`: continue, or exit because the run is over (`finished`) or for the reason `why`."""

    finished: bool = False
    why: str = ""
    again: bool = False
    """Only the engine is lost, not the run: it may restart, and join again under its name."""


class Committed(Message, frozen=True):
    """Reply to `WeightsCommit`."""

    pause_ms: tuple[float, ...]
    """Pause of each engine."""


class TurnTaken(Message, frozen=True):
    """Reply to `TurnAwaited` and `EngineStarts`: the turn has come."""

    seconds: dict[str, float]
    """What engines did for it, by part of `asyncmoe.telemetry.schema.Step.switch_seconds`."""


class Done(Message, frozen=True):
    """Reply without content."""


class Refused(Message, frozen=True):
    """Reply to a request that failed. `kind` is the name of an error class in `asyncmoe.errors`."""

    kind: str
    text: str


QueueRequest = Hello | Lease | FindWorker | Commit | Saved | Evaluations | Goodbye
WeightsUpdate = WeightsJoin | WeightsStage | WeightsBegin | WeightsBucket | WeightsCommit | WeightsFiles | WeightsAbort
WeightsRequest = WeightsUpdate | EnginesAsk | TurnAwaited | EngineStarts
EngineRequest = EngineJoin | EngineAlive | EngineLeave | EngineNode | EngineNodeEnd
Request = QueueRequest | WeightsLoaded | WeightsRequest | EngineRequest | WorkerJoin | WorkerRequest
EngineReply = Engines | EngineJoined | EngineOrder | EngineNodes
Reply = Welcome | Leased | Evaluated | Fetched | WorkerFound | EngineReply | Committed | TurnTaken | Done | Refused | WorkerReply
