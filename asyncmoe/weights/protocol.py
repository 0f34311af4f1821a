"""The weight protocol: the messages between trainer and engine ranks, in the order in which they are sent.

Every message is a value in a key-value store hosted by the trainer's rank 0 (`receiver/control_store.py`). Ranks are numbered
consecutively: the trainer's first, then each engine's. Only the weights use another channel (`receiver/channel.py`). A *meeting* is a set
of trainer and engine ranks that have agreed on a plan; if the set of engines changes, a new meeting begins.

Meeting     rank 0 sets `TERMS`; every other rank sets `ready(rank)`; rank 0 compares them all and sets `VERDICT`
Channel E   every other rank sets `channel(E, "arrive", rank)`, rank 0 `channel_all(E, "arrive")`; each rank makes its end of the channel,
            and the same exchange is repeated with "make"
Update N    rank 0 sets `header(N)`; senders set `sent(N, rank)`, receivers `staged(N, rank)`; rank 0 sets `end(N)` after the commit, and
            `over(N)` when the trainer is done with the version
Delta N     in a meeting with deltas, before the header: every trainer rank encodes its changes and sets `offer(N, rank)`; rank 0 decides
            whether the update is a delta, and sets `coming(N, rank)` for every engine rank. A receiver whose weights, or
            whose received messages, do not fit the delta sets `doubtful` in its `Outcome`; rank 0 then sets it in `end(N)`, too, and
            the version is sent again in full
Leaving     trainer ranks set `left(rank)`; then rank 0 may close the store

A message with a failure says why its author cannot continue. `FAILED` ends the whole meeting; `channel_failed(E, stage)` and
`update_failed(N)` end one stage of it. Waiting ranks poll these keys, so no rank waits for a rank that has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec

from asyncmoe.config.transports import TransportName
from asyncmoe.errors import ReportedFailure
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora.adapter import Kind

T = TypeVar("T", bound=msgspec.Struct)
ChannelStage = Literal["arrive", "make"]
ELSEWHERE = "another rank has failed"
"""The failure reported by a rank that merely waited for the failed rank (`asyncmoe.weights.receiver.failing.cause`)."""


class EngineRanks(msgspec.Struct, frozen=True):
    """An engine and its ranks, `first` to `first + tp - 1`."""

    name: str
    tp: int
    ep: int
    first: int
    attn_dp: int = 1

    @property
    def parallel(self) -> EngineParallel:
        return EngineParallel(self.tp, self.ep, self.attn_dp)


class Terms(msgspec.Struct, frozen=True):
    """Everything a rank needs to plan a transfer.

    Attributes:
        hf: the model's Hugging Face configuration.
        adapter: the adapter to send; None: all weights.
        trainer: the trainer's parallel sizes.
        dtype, engine_dtype: dtypes of the weights in the trainer and in the engines.
        transport: the transport for the weights.
        session: unique name of this meeting on its host.
        in_place: whether engines receive full updates directly into their parameters, because a GPU has no room for staging memory; set
            from the verdict.
        delta: whether updates may be deltas, so that every version is verified by a canonical digest.
        timeout_s: limit on a transfer, and on the rendezvous.
        max_ctas: as for `asyncmoe.reshard.nccl_transport.NcclTransport`.
    """

    hf: dict[str, Any]
    adapter: Kind | None
    trainer: MegatronParallel
    engines: tuple[EngineRanks, ...]
    dtype: str
    engine_dtype: str
    transport: TransportName
    session: str
    bucket_bytes: int
    timeout_s: float
    max_ctas: int = 0
    delta: bool = False
    in_place: bool = False

    @property
    def world(self) -> int:
        return self.engines[-1].first + self.engines[-1].tp


class Parameter(msgspec.Struct, frozen=True):
    """A parameter in an engine. `shares` names an earlier parameter with the same storage; empty if there is none."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    shares: str = ""


class Card(msgspec.Struct, frozen=True):
    """A rank's GPU and the library versions the rank uses.

    Attributes:
        device: the device's name in this process ("cuda:1").
        uuid: the device's identity, the same in every process.
        free, total: bytes that can still be allocated, and the GPU's memory, in bytes.
        wanted: bytes that receiving allocates besides staging memory.
        copy: bytes of staging memory for a whole version; 0 on trainer ranks.
        nccl, library: version and file of NCCL if the transport is NCCL; otherwise empty.
        network: how NCCL connects this host to others (`rpc.nics.network`); otherwise empty.
        unreachable: UUIDs of GPUs on this host whose memory this GPU cannot read (`cudaDeviceCanAccessPeer`).
    """

    host: str
    device: str
    uuid: str
    free: int
    total: int
    wanted: int
    nccl: str = ""
    library: str = ""
    unreachable: tuple[str, ...] = ()
    copy: int = 0
    network: str = ""


class RankReport(msgspec.Struct, frozen=True):
    """Success, or a description of the failure."""

    failure: str = ""

    def check(self) -> None:
        """Raise ReportedFailure, a WeightSyncError, if there is a failure."""
        if self.failure:
            raise ReportedFailure(self.failure)


class Ready(RankReport, frozen=True):
    """A rank has planned its part, or failed to. `parameters`, `places` and `obstacles` are empty on trainer ranks."""

    plan: str = ""
    """The plan's digest."""
    parameters: dict[str, Parameter] = {}
    places: dict[str, int] = {}
    """SGLang's "tp_rank", "moe_ep_rank" and "attn_dp_rank" of the worker."""
    obstacles: tuple[str, ...] = ()
    """Reasons why weights must not be written into the worker's parameters."""
    card: Card | None = None
    """None without a GPU."""


class Header(msgspec.Struct, frozen=True):
    """An update begins over channel `epoch`, or has failed before it began.

    Attributes:
        base: the version that the update changes, if it is a delta; None: it is full.
    """

    version: int
    epoch: int
    failure: str = ""
    base: int | None = None


class Outcome(RankReport, frozen=True):
    """The result of a rank's part.

    Attributes:
        doubtful: the rank's memory, or what it received, does not fit the delta; a full update may succeed.
    """

    doubtful: bool = False


class Portion(msgspec.Struct, frozen=True):
    """The data from a trainer rank to one engine rank.

    Attributes:
        dense: size of a full update in bytes.
        sizes: sizes in bytes of its delta's messages, in order; empty if there is no delta.
        digest: canonical digest of the elements sent, in the new version (`asyncmoe.reshard.element_digest`).
    """

    dense: int
    sizes: tuple[int, ...]
    digest: int


class Offer(RankReport, frozen=True):
    """The data that a trainer rank can send for an update.

    Attributes:
        base: the version that its delta changes; None: it can only send everything.
        parts: the portion for each engine rank.
        changed, elements: changed elements in the delta, and all elements that it covers; elements sent to several engine ranks count once.
    """

    base: int | None = None
    parts: dict[int, Portion] = {}
    changed: int = 0
    elements: int = 0


class Coming(msgspec.Struct, frozen=True):
    """The data that an engine rank receives in an update.

    Attributes:
        sizes: sizes in bytes of a delta's messages, in order, by trainer rank; empty for a full update.
        digests: by trainer rank, the canonical digest of the elements from that rank.
    """

    sizes: dict[int, tuple[int, ...]]
    digests: dict[int, int]


class MeetingOutcome(RankReport, frozen=True):
    """Whether weights can be sent, or why not.

    Attributes:
        in_place: see `Terms`.
    """

    in_place: bool = False

    def settle(self, terms: Terms) -> Terms:
        """Return the terms with the decisions filled in."""
        return msgspec.structs.replace(terms, in_place=self.in_place)


class Over(RankReport, frozen=True):
    """The update is finished, or its weights must be resent (`again`), or rank 0 failed."""

    again: bool = False


class AllArrived(RankReport, frozen=True):
    """All ranks have reached the stage, or one has failed.

    Attributes:
        unique_id: NCCL's unique ID, from which all ranks make their communicator; empty for other transports, and once the communicator is
            made.
    """

    unique_id: bytes = b""


@dataclass(frozen=True)
class Key(Generic[T]):
    """The name of a message in the store, and its type."""

    name: str
    type: type[T]


@dataclass(frozen=True)
class Keys(Generic[T]):
    """The names of messages of one type; a call fills the update, stage or rank that distinguishes them into `pattern`."""

    pattern: str
    type: type[T]

    def __call__(self, *place: int | str) -> Key[T]:
        return Key(self.pattern.format(*place), self.type)


TERMS = Key("terms", Terms)
VERDICT = Key("verdict", MeetingOutcome)
FAILED = Key("failed", Outcome)
ready = Keys("ready/{}", Ready)
left = Keys("left/{}", Outcome)
channel = Keys("channel/{}/{}/{}", Outcome)
channel_all = Keys("channel/{}/{}/all", AllArrived)
channel_failed = Keys("channel/{}/{}/failed", Outcome)
header = Keys("{}.header", Header)
sent = Keys("{}.sent.{}", Outcome)
staged = Keys("{}.staged.{}", Outcome)
update_failed = Keys("{}.failed", Outcome)
end = Keys("{}.end", Outcome)
over = Keys("{}.over", Over)
offer = Keys("{}.offer.{}", Offer)
coming = Keys("{}.coming.{}", Coming)


def moved(update: int, terms: Terms) -> dict[Key[Outcome], str]:
    """Return the keys under which all ranks report their part of an update, mapped to the rank's name."""
    senders = {sent(update, rank): name for rank, name in trainer_ranks(terms).items()}
    return senders | {staged(update, rank): name for rank, name in engine_ranks(terms).items()}


def passing(update: int, terms: Terms) -> list[Key[Any]]:
    """Return the keys of an update to delete once it is over: all but its header, which a receiver that was suspended needs to find the
    newest update."""
    found: list[Key[Any]] = [update_failed(update), end(update), over(update), *moved(update, terms)]
    if terms.delta:
        found += [*(offer(update, rank) for rank in trainer_ranks(terms)), *(coming(update, rank) for rank in engine_ranks(terms))]
    return found


def names(terms: Terms) -> dict[int, str]:
    """Return the name of every rank, for error messages."""
    return trainer_ranks(terms) | engine_ranks(terms)


def trainer_ranks(terms: Terms) -> dict[int, str]:
    """Return the name of every trainer rank, for error messages."""
    return {rank: f"trainer rank {rank}" for rank in range(terms.engines[0].first)}


def engine_ranks(terms: Terms) -> dict[int, str]:
    """Return the name of every engine rank, for error messages."""
    return {engine.first + tp: f"{engine.name} rank {tp}" for engine in terms.engines for tp in range(engine.tp)}
