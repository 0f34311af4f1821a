"""Every message of the queue protocol and of the weight protocol.

The trainer's ranks ask, the controller answers; a request has exactly one reply. Messages are msgpack (msgspec tagged
structs); trajectories follow a `Fetched` reply as raw frames (`asyncmoe.trajectory.encode`).

Leases are named by the trainer's step, so asking is idempotent: every rank asks for the lease of step k and all get the same
answer, without a collective among the ranks.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncmoe.rpc.peers import Facts

Phase = Literal["warmup", "rl"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class name."""


# ---------------------------------------------------------------- requests: queue


class Hello(Message, frozen=True):
    """First message of every rank. The controller refuses a trainer of another configuration."""

    rank: int
    world: int
    config_digest: str
    step: int
    """Optimizer steps the trainer has already taken (not 0 after a resume)."""
    facts: Facts | None = None
    """Of its machine, where it may be another."""


class Lease(Message, frozen=True):
    """Ask for the batch of step `step`. Waits until there is one or `wait_s` is over."""

    step: int
    phase: Phase
    count: int
    version: int
    """The trainer's current version; what the consumption rule measures age from."""
    wait_s: float


class Fetch(Message, frozen=True):
    """Ask for the leased trajectories named `keys`."""

    step: int
    keys: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    """Send only these layers' routes; None: all there are."""
    masks: bool = True
    """Send sampling masks."""


class Commit(Message, frozen=True):
    """The batch of step `step` has been trained on; its lease ends."""

    step: int


class Saved(Message, frozen=True):
    """A checkpoint covers every step up to and including `step`."""

    step: int


class Goodbye(Message, frozen=True):
    """A rank of the trainer leaves: all steps are done (`finished`), or the trainer stops early and will resume."""

    rank: int
    finished: bool


# ---------------------------------------------------------------- requests: weights


class WeightsJoin(Message, frozen=True):
    """All engines join the process group that weights travel in; the trainer's `senders` ranks come first in it.

    Method "broadcast": the trainer's rank 0 joins while this request is open. "reshard": the engines' receivers are started, and meet
    the sender at this address.
    """

    host: str
    port: int
    group: str
    backend: Literal["gloo", "nccl"]
    method: Literal["broadcast", "reshard"] = "broadcast"
    senders: int = 1


class WeightsStage(Message, frozen=True):
    """Open an update whose weights go to the engines' receivers; `WeightsCommit` completes it.

    They go into memory of their own while the engines generate, or, with `in_place`, into the parameters of engines that stand still
    from this request on.
    """

    version: int
    in_place: bool = False


class WeightsBegin(Message, frozen=True):
    """Pause all engines in place and open their update."""

    version: int


class WeightsBucket(Message, frozen=True):
    """One flattened bucket: the bytes of `names` one after the other. Sent by broadcast while this request is open."""

    version: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """As torch prints them without the prefix: "float32", "bfloat16"."""
    shapes: tuple[tuple[int, ...], ...]


class WeightsCommit(Message, frozen=True):
    """Close the update, publish `version`, let the engines go on.

    `checksums` (optional) maps an engine rank to {SGLang parameter: checksum}; every engine must agree before it goes on.
    `update` is the number of the update that all receivers have said they hold, after `WeightsStage`.
    """

    version: int
    checksums: tuple[dict[str, str], ...] = ()
    update: int = 0


class WeightsAdapter(Message, frozen=True):
    """Have every engine load the adapter in a folder, and sample new requests with it: that is `version`."""

    version: int
    folder: str


class WeightsAbort(Message, frozen=True):
    """The sender failed: fence the engines that hold a part of `version`."""

    version: int
    why: str


class EnginesAsk(Message, frozen=True):
    """Ask which engines there are now; waits until the run's have started or `wait_s` is over. From the reply on they are the roster."""

    wait_s: float
    devices: bool = False
    """Ask each what device it computes on, too."""


# ---------------------------------------------------------------- requests: engines of other machines


class EngineJoin(Message, frozen=True):
    """An engine that takes requests wants to be one of the run's. It gets its first ones with the next version."""

    name: str
    url: str
    """"http://10.1.0.3:30000"."""
    key: str
    """What its server wants to be shown."""
    host: str
    """`asyncmoe.rpc.address.host_id` of its machine."""
    tp: int
    ep: int
    config_digest: str
    facts: Facts | None = None


class EngineAlive(Message, frozen=True):
    """It is still there. Answered when there is something to do, or after `wait_s`."""

    name: str
    wait_s: float


class EngineLeave(Message, frozen=True):
    """It wants to go; answered when it has nothing to do any more. With `why` it is gone already."""

    name: str
    why: str = ""


# ---------------------------------------------------------------- replies


class Item(Message, frozen=True):
    """A leased trajectory without its arrays."""

    key: str
    group: int
    episode: int
    agent: int
    """Responses of the same agent are compared within a group."""
    tokens: int
    sampled: int
    """Tokens with loss_mask True."""
    reward: float
    oldest_version: int
    newest_version: int
    weight: float = 1.0
    """What its tokens count for, times what the aggregation plans: less than 1 only under the downweight rule."""
    steps: int = 0
    """Rewarded steps."""
    step_mean: float = 0.0
    """Their mean reward; exactly theirs where all are equal."""
    step_squares: float = 0.0
    """Sum of the squared distances of their rewards from it."""
    teacher_gap: float | None = None
    """Sum over sampled tokens of engine's - teacher's log-probability, in nats, where a teacher was asked."""


class Welcome(Message, frozen=True):
    """Reply to `Hello`."""

    run: str


class Leased(Message, frozen=True):
    """Reply to `Lease`; `items` is empty when `wait_s` was over first."""

    step: int
    items: tuple[Item, ...]
    queue_depth: int
    dropped: dict[str, int]
    """Trajectories dropped so far, by reason."""
    stop: bool = False
    """The run is to stop here and resume later: save a checkpoint, say `Goodbye`. All ranks get the same answer for a step."""


class Fetched(Message, frozen=True):
    """Reply to `Fetch`; `frames_in(len(keys))` frames follow, in the order of `keys`."""

    keys: tuple[str, ...]


class EngineInfo(Message, frozen=True):
    """One engine; its ranks are `rank_offset .. rank_offset + tp - 1` of the weight group."""

    name: str
    tp: int
    ep: int
    rank_offset: int
    version: int
    host: str = ""
    """`asyncmoe.rpc.address.host_id` of its machine."""
    device: str = ""
    """What its server says it computes on, "cpu" or "cuda"; empty where that was not asked."""


class Engines(Message, frozen=True):
    """Reply to `EnginesAsk`; `world` is the size of the weight group, the sender included."""

    engines: tuple[EngineInfo, ...]
    world: int
    roster: int
    """Another number whenever the engines are others than before."""
    lost: tuple[str, ...] = ()
    """Engines of the version under way, or else of the roster before, that are gone."""


class EngineOrder(Message, frozen=True):
    """Reply to `EngineAlive`: go on, or end because the run is over (`finished`) or for a reason of `why`."""

    finished: bool = False
    why: str = ""


class Committed(Message, frozen=True):
    """Reply to `WeightsCommit`."""

    version: int
    pause_ms: tuple[float, ...]
    """How long each engine stood still."""


class Done(Message, frozen=True):
    """Reply when there is nothing to say."""


class Refused(Message, frozen=True):
    """Reply to a request that failed. `kind` is the name of an error class in `asyncmoe.errors`."""

    kind: str
    text: str


Request = (
    Hello
    | Lease
    | Fetch
    | Commit
    | Saved
    | Goodbye
    | WeightsJoin
    | WeightsStage
    | WeightsBegin
    | WeightsBucket
    | WeightsCommit
    | WeightsAdapter
    | WeightsAbort
    | EnginesAsk
    | EngineJoin
    | EngineAlive
    | EngineLeave
)
Reply = Welcome | Leased | Fetched | Engines | EngineOrder | Committed | Done | Refused
