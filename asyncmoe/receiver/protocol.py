"""The weight protocol: what the ranks of the trainer and of the engines tell each other, in the order they say it.

Every message is a value in a key-value store that the trainer's rank 0 keeps (`asyncmoe.receiver.control_store`). Ranks count through:
first those of the trainer, then those of each engine. Only the weights themselves travel another way (`asyncmoe.receiver.channel`).

Meeting     rank 0 sets `TERMS`; every other rank answers `ready(rank)`; rank 0 compares all answers and sets `VERDICT`
Channel E   every other rank sets `channel(E, "arrive", rank)`, rank 0 `channel_all(E, "arrive")`; each makes its end, and the same follows
            with "make"
Update N    rank 0 sets `header(N)`; senders set `sent(N, rank)`, receivers `staged(N, rank)`; rank 0 sets `end(N)`, and `over(N)` when the
            trainer goes on
Leaving     trainer ranks set `left(rank)`: rank 0 may close the store

A message with a failure says why its sender cannot go on. `FAILED` ends the whole meeting, `channel_failed(E, stage)` and
`update_failed(N)` one stage of it. Whoever waits looks at them, so nobody waits for a rank that has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec

from asyncmoe.errors import WeightSyncError

T = TypeVar("T", bound=msgspec.Struct)
ChannelStage = Literal["arrive", "make"]
ELSEWHERE = "another rank has failed"
"""The failure of a rank that only waited for the rank that failed (`asyncmoe.receiver.failing.cause`)."""


class EngineRanks(msgspec.Struct, frozen=True):
    """An engine and its ranks, `first` to `first + tp - 1`."""

    name: str
    tp: int
    ep: int
    first: int


class AdapterTerms(msgspec.Struct, frozen=True):
    """Fields of `asyncmoe.models.lora.adapter.Kind`."""

    targets: tuple[str, ...]
    rank: int
    alpha: float
    experts: Literal["per_expert", "shared_outer"]


class Terms(msgspec.Struct, frozen=True):
    """Everything a rank needs to plan a transfer.

    Attributes:
        adapter: the adapter to send; None: all weights.
        trainer: fields of `asyncmoe.models.MegatronParallel`.
        dtype, engine_dtype: of the weights in the trainer and in the engines.
        transport: how the weights travel.
        session: unique name of this meeting on its host.
        staging: engines receive into staging memory; otherwise straight into their parameters.
        timeout_s: bound of a transfer, and of the meeting.
        max_ctas: of an NCCL communicator (`asyncmoe.receiver.communicators`).
    """

    hf: dict[str, Any]
    adapter: AdapterTerms | None
    trainer: dict[str, int | bool | None]
    engines: tuple[EngineRanks, ...]
    dtype: str
    engine_dtype: str
    transport: Literal["shm", "gloo", "nccl", "ipc"]
    session: str
    staging: bool
    bucket_bytes: int
    timeout_s: float
    max_ctas: int = 0

    @property
    def world(self) -> int:
        return self.engines[-1].first + self.engines[-1].tp


class Parameter(msgspec.Struct, frozen=True):
    """A parameter as an engine holds it. `shares` names an earlier parameter with the same storage."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    shares: str = ""


class Card(msgspec.Struct, frozen=True):
    """A rank's GPU, and the libraries that the rank uses it with.

    Attributes:
        device: "cuda:1", as its process calls it.
        uuid: the same in every process.
        model: its name and compute capability.
        free, total: bytes that can be allocated, and bytes of the card.
        wanted: bytes that receiving will allocate.
        torch: version.
        nccl, library: version and file of NCCL, if messages travel by NCCL; otherwise empty.
        unreachable: GPUs of this host, by uuid, whose memory it cannot read (`cudaDeviceCanAccessPeer`).
    """

    host: str
    device: str
    uuid: str
    model: str
    free: int
    total: int
    wanted: int
    torch: str
    nccl: str = ""
    library: str = ""
    unreachable: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """A rank has planned its part. Trainer ranks leave the fields of engines empty."""

    failure: str = ""
    plan: str = ""
    """The plan's digest."""
    parameters: dict[str, Parameter] = {}
    places: dict[str, int] = {}
    """SGLang's own "tp_rank", "moe_ep_rank"."""
    obstacles: tuple[str, ...] = ()
    """Why weights must not be written into its parameters."""
    card: Card | None = None
    """None without a GPU."""


class Header(msgspec.Struct, frozen=True):
    """An update begins over channel `epoch`; with a failure it does not."""

    version: int
    epoch: int
    failure: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """Success, or a failure in words."""

    failure: str = ""

    def check(self) -> None:
        """Raise WeightSyncError if the outcome is a failure."""
        if self.failure:
            raise WeightSyncError(self.failure)


class Over(msgspec.Struct, frozen=True):
    """The update is finished, its weights must be sent again, or rank 0 failed."""

    again: bool = False
    failure: str = ""


class HeldCommunicator(msgspec.Struct, frozen=True):
    """A communicator that a rank could use again.

    Attributes:
        id: see `Agreed`.
        runs: successful exchanges over it, on this rank.
    """

    id: str
    runs: int


class Agreed(msgspec.Struct, frozen=True):
    """The communicator of an engine.

    Attributes:
        id: unique among all communicators of the run, past and present.
        unique_id: what to make it from; empty if every rank holds it already.
    """

    id: str
    unique_id: bytes = b""


class Arrived(msgspec.Struct, frozen=True):
    """A rank is ready to make its end of a channel, or has made it; or why not.

    Attributes:
        held: communicators it could use again (`Communicators.held`).
    """

    failure: str = ""
    held: dict[str, HeldCommunicator] = {}


class AllArrived(msgspec.Struct, frozen=True):
    """All ranks are; or why not.

    Attributes:
        agreed: the communicators to use, by engine.
    """

    failure: str = ""
    agreed: dict[str, Agreed] = {}


@dataclass(frozen=True)
class Key(Generic[T]):
    """Where a message lies in the store, and its type."""

    name: str
    type: type[T]


TERMS = Key("terms", Terms)
VERDICT = Key("verdict", Outcome)
FAILED = Key("failed", Outcome)


def ready(rank: int) -> Key[Ready]:
    return Key(f"ready/{rank}", Ready)


def left(rank: int) -> Key[Outcome]:
    return Key(f"left/{rank}", Outcome)


def channel(epoch: int, stage: ChannelStage, rank: int) -> Key[Arrived]:
    return Key(f"channel/{epoch}/{stage}/{rank}", Arrived)


def channel_all(epoch: int, stage: ChannelStage) -> Key[AllArrived]:
    return Key(f"channel/{epoch}/{stage}/all", AllArrived)


def channel_failed(epoch: int, stage: ChannelStage) -> Key[Outcome]:
    return Key(f"channel/{epoch}/{stage}/failed", Outcome)


def header(update: int) -> Key[Header]:
    return Key(f"{update}/header", Header)


def sent(update: int, rank: int) -> Key[Outcome]:
    return Key(f"{update}/sent/{rank}", Outcome)


def staged(update: int, rank: int) -> Key[Outcome]:
    return Key(f"{update}/staged/{rank}", Outcome)


def update_failed(update: int) -> Key[Outcome]:
    return Key(f"{update}/failed", Outcome)


def end(update: int) -> Key[Outcome]:
    return Key(f"{update}/end", Outcome)


def over(update: int) -> Key[Over]:
    return Key(f"{update}/over", Over)


def moved(update: int, terms: Terms) -> dict[Key[Outcome], str]:
    """The keys by which all ranks report their part of an update -> the name of the rank."""
    senders = {sent(update, rank): f"trainer rank {rank}" for rank in range(terms.engines[0].first)}
    return senders | {staged(update, rank): name for rank, name in engine_ranks(terms).items()}


def names(terms: Terms) -> dict[int, str]:
    """Every rank's name in messages."""
    return {rank: f"trainer rank {rank}" for rank in range(terms.engines[0].first)} | engine_ranks(terms)


def engine_ranks(terms: Terms) -> dict[int, str]:
    """Every engine rank's name in messages."""
    return {engine.first + tp: f"{engine.name} rank {tp}" for engine in terms.engines for tp in range(engine.tp)}
