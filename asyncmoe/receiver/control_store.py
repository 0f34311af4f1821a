"""Where the sender's and the receivers' ranks meet: a key-value store kept by the trainer's rank 0, and process groups made over it.

Ranks of the trainer come first, then those of all engines. Everything but the weights themselves goes through the store, so a
receiver waits for its next update without touching the process group, and a sender that dies is noticed at once.

    terms               rank 0      what there is: both sides plan from it, each rank alone
    ready/R             others      R has planned, and what parameters it has; or why not
    verdict             rank 0      whether all agree
    failed              anyone      a rank is gone for good, and why: nothing of this meeting can go on
    channel/E/come/R, channel/E/made/R
                        others      R makes, has made, its end of channel E; or why not. With the former, what it could go on with
    channel/E/come/all, channel/E/made/all
                        rank 0      all ranks do, have; or why not. With the former, what they go on with
    N/header            rank 0      update N begins, over channel `epoch`
    N/sent/S, N/staged/R            trainer rank S has sent, engine rank R has received and verified, everything; or why not
    N/failed            anyone      set with the former when it says why not, so that nobody has to wait for the others
    N/end               rank 0      how the update ended
    N/over              rank 0      the trainer goes on to the next, or N's weights are sent again
    left/S              others      trainer rank S needs the store no more
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncmoe.errors import AsyncmoeError, TransferError, WaitTimeout, WeightSyncError
from asyncmoe.rpc.address import towards

T = TypeVar("T", bound=msgspec.Struct)
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.025
"""Between two looks for others' keys: short where all is quick, and no load beside a long step."""
_WATCH_S = 1.0
_LAST_WORDS_S = 0.5
"""How long the others are listened to when one has failed: it may be a consequence of what they have to say."""
_ELSEWHERE = "another rank has failed"
_OF_A_PEER = ("is gone", "remote process exited or there was a network error", _ELSEWHERE)
"""Words for a peer that has ended or failed, in the first place of transports; the second are NCCL's (ncclRemoteError)."""
_c10d: Any = distributed_c10d


class StoreGone(WeightSyncError):
    """The trainer's rank 0 has ended, or does not keep the store any more: nobody is left to talk to."""


class EngineRanks(msgspec.Struct, frozen=True):
    """An engine: `tp` ranks from `first` on."""

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
    """All that a rank needs to plan.

    Attributes:
        adapter: what is sent: the weights (None), or an adapter.
        trainer: fields of `asyncmoe.models.MegatronParallel`.
        dtype, engine_dtype: of the weights on either side.
        transport: how they travel.
        session: names this meeting among all on this host.
        staging: whether engines receive into memory of its own, or into their parameters.
        timeout_s: bound of an update's transfer, and of the meeting.
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
    """A parameter as an engine has it. `shares` is the parameter before it with the same storage."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    shares: str = ""


class Card(msgspec.Struct, frozen=True):
    """A rank's GPU, and the libraries that the rank uses it with.

    Attributes:
        device: "cuda:1", as its process calls it.
        uuid: what every process calls it.
        model: its name and compute capability.
        free, total: bytes that can be had, and all it has.
        wanted: bytes that are going to be taken for receiving.
        torch: version.
        nccl, library: version and file of the NCCL that its messages would travel by; empty where they travel otherwise.
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
    """A rank has planned. What only engines have is empty of a trainer's rank."""

    failure: str = ""
    plan: str = ""
    """The plan's digest."""
    parameters: dict[str, Parameter] = {}
    places: dict[str, int] = {}
    """SGLang's own "tp_rank", "moe_ep_rank"."""
    obstacles: tuple[str, ...] = ()
    """Why weights must not be written into its parameters."""
    card: Card | None = None
    """None of a CPU."""


class Header(msgspec.Struct, frozen=True):
    """An update begins; or, with a failure, it does not."""

    version: int
    epoch: int
    failure: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """How something went that others wait for; without a failure it went well."""

    failure: str = ""


class Over(msgspec.Struct, frozen=True):
    """An update that all engines have is over, or its weights are to be sent again; or rank 0 cannot tell."""

    again: bool = False
    failure: str = ""


class Store:
    """The store, with typed values. One thread at a time.

    Args:
        rank: of the process group; who speaks.
        port: rank 0's.
        listener: of rank 0, which keeps the store: a listening socket on that port, which it takes over.
    """

    def __init__(self, group: str, rank: int, host: str, port: int, timeout_s: float, listener: socket.socket | None = None) -> None:
        self.rank, self._group, self._peer = rank, group, f"the trainer's rank 0 at {host}:{port}"
        self._at = host, port
        mine: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}
        try:
            store = cast(Any, dist).TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, **mine)
        except RuntimeError as error:
            raise WeightSyncError(f"{self._peer}: {_first_line(error)}") from error
        self._store = _c10d.PrefixStore(group, store)

    def put(self, key: str, value: msgspec.Struct) -> None:
        """Raises WeightSyncError when rank 0 is gone."""
        try:
            self._store.set(key, msgspec.msgpack.encode(value))
        except RuntimeError as error:
            raise StoreGone(f"{self._peer} is gone: {_first_line(error)}") from error

    def get(self, key: str, kind: type[T], timeout_s: float, whom: str = "") -> T:
        """The value of a key, when it is there.

        Args:
            whom: who sets it, for the error.

        Raises:
            WaitTimeout: it was not set in time.
            WeightSyncError: rank 0 is gone.
        """
        begin = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, timeout_s)))
            return msgspec.msgpack.decode(self._store.get(key), type=kind)
        except dist.DistStoreError as error:
            raise WaitTimeout(whom or self._peer, key, time.monotonic() - begin) from error
        except RuntimeError as error:
            raise StoreGone(f"{self._peer} is gone: {_first_line(error)}") from error

    def get_all(
        self, keys: Mapping[str, str], kind: type[T], timeout_s: float, failed: str = "failed", watch: Callable[[], None] = lambda: None
    ) -> dict[str, T]:
        """The values of keys, when all are there; or those there are, soon after `failed` is, or a rank has resigned.

        Args:
            keys: key -> who sets it.
            watch: called every second of waiting; raises what makes waiting vain.

        Raises:
            WaitTimeout: naming whose are missing.
            WeightSyncError: rank 0 is gone.
        """
        began = time.monotonic()
        until, some_failed, look = began + timeout_s, False, began + _WATCH_S
        every = list(keys)
        # One question a sweep, however many keys: a server's `wait` would need none, but says on stderr whenever it is given up.
        while not (complete := self._have(every)):
            now = time.monotonic()
            if now > until:
                break
            if now > look:
                watch()
                look = time.monotonic() + _WATCH_S
            if not some_failed and (self.has(failed) or self.has("failed")):
                some_failed, until = True, now + _LAST_WORDS_S
            time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, (now - began) / 32)))
        missing = {} if complete else {key: whom for key, whom in keys.items() if not self.has(key)}
        if missing and not some_failed:
            raise WaitTimeout(", ".join(missing.values()), next(iter(missing)), timeout_s)
        return self._values([key for key in every if key not in missing], kind)

    def _values(self, keys: list[str], kind: type[T]) -> dict[str, T]:
        """Of keys that are set."""
        try:
            found = self._store.multi_get(keys) if keys else []
        except RuntimeError as error:
            raise StoreGone(f"{self._peer} is gone: {_first_line(error)}") from error
        return {key: msgspec.msgpack.decode(value, type=kind) for key, value in zip(keys, found, strict=True)}

    def fail(self, number: int, key: str, why: str) -> None:
        """Say under `key` why an update cannot go on."""
        self.put(key, Outcome(why))
        self.put(f"{number}/failed", Outcome())

    def resign(self, number: int, why: str) -> None:
        """Say that this rank takes part in nothing any more, whatever the others wait for: the meeting, a channel, or update `number`."""
        self.put("failed", Outcome(why))
        for key in (f"{number}/sent/{self.rank}", f"{number}/staged/{self.rank}"):
            self.fail(number, key, why)

    def resigned(self) -> str:
        """Why a rank takes part in nothing any more; empty while all do."""
        return self.get("failed", Outcome, 1.0).failure if self.has("failed") else ""

    def heed_others(self, *keys: str) -> None:
        """Raises WeightSyncError when somebody has set a key of those that say that a rank has failed, or has resigned."""
        if any(self.has(key) for key in ("failed", *keys)):
            raise WeightSyncError(_ELSEWHERE)

    def forget(self, number: int, terms: Terms) -> None:
        """Drop what is left of an update that all ranks have done with."""
        # Headers stay: a receiver that slept finds the newest by them.
        names = [f"{number}/{name}" for name in ("failed", "end", "over")]
        for key in (*names, *moved_keys(number, terms)):
            self._store.delete_key(key)

    def connect(self, world: int, epoch: int, timeout_s: float) -> dist.ProcessGroup:
        """Make process group `epoch` of all ranks; returns when all have come.

        It is in no registry of torch's: neither the trainer's nor SGLang's default group knows its ranks.

        Raises:
            WaitTimeout: the others did not come in time.
            WeightSyncError: one that had come is gone.
        """
        began = time.monotonic()
        gloo = _c10d.ProcessGroupGloo
        try:
            store = _c10d.PrefixStore(f"group{epoch}", self._store)
            options = gloo._Options()
            # By default the one that the host's name stands for, which other machines often cannot reach.
            options._devices = [gloo.create_device(hostname=towards(*self._at))]
            options._timeout = timedelta(seconds=timeout_s)
            group: dist.ProcessGroup = gloo(store, self.rank, world, options)
        except RuntimeError as error:
            waited = time.monotonic() - began
            if waited < timeout_s:
                raise WeightSyncError(f"rank {self.rank}: joining weight group {self._group}: {_first_line(error)}") from error
            raise WaitTimeout("the other ranks", f"join weight group {self._group} ({_first_line(error)})", waited) from error
        return group

    def has(self, key: str) -> bool:
        """Raises WeightSyncError when rank 0 is gone."""
        return self._have([key])

    def _have(self, keys: list[str]) -> bool:
        """Whether all are set."""
        try:
            return not keys or bool(self._store.check(keys))
        except RuntimeError as error:
            raise StoreGone(f"{self._peer} is gone: {_first_line(error)}") from error


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of `host`, for rank 0 to hand to its `Store`."""
    return socket.create_server((host, 0))


def moved_keys(number: int, terms: Terms) -> dict[str, str]:
    """Keys of what every rank moved in an update, and who sets them."""
    senders = {f"{number}/sent/{rank}": f"trainer rank {rank}" for rank in range(terms.engines[0].first)}
    return senders | {f"{number}/staged/{rank}": whom for rank, whom in engine_ranks(terms).items()}


def heed(outcome: Outcome) -> None:
    """Raises WeightSyncError for an outcome that is none."""
    if outcome.failure:
        raise WeightSyncError(outcome.failure)


def names(terms: Terms) -> dict[int, str]:
    """Every rank and what messages call it."""
    return {rank: f"trainer rank {rank}" for rank in range(terms.engines[0].first)} | engine_ranks(terms)


def engine_ranks(terms: Terms) -> dict[int, str]:
    """Every engine rank and what messages call it."""
    return {engine.first + tp: f"{engine.name} rank {tp}" for engine in terms.engines for tp in range(engine.tp)}


def cause(failures: Mapping[str, str]) -> str:
    """The failure that the others follow from.

    Args:
        failures: who said it -> what it said, as `in_words` makes it.
    """

    def is_consequence(text: str) -> int:
        waited = re.match(r"waited [\d.]+ s for (.*?):", text)
        if waited:
            return 3 if any(whom in failures for whom in waited[1].split(", ")) else 1
        return 2 if any(words in text for words in _OF_A_PEER) else 0

    return min(failures.values(), key=is_consequence)


def in_words(error: AsyncmoeError, terms: Terms) -> str:
    """An error of the transfer, with its ranks called by what they are."""
    who = names(terms)

    def called(text: str) -> str:
        return re.sub(r"\branks? (\d+(?:, \d+)*)\b", lambda found: ", ".join(who[int(rank)] for rank in found[1].split(", ")), text)

    if isinstance(error, TransferError):
        return f"from {who[error.source]} to {who[error.destination]}: {called(error.what)}"
    if isinstance(error, WaitTimeout) and re.fullmatch(r"ranks? (\d+(?:, \d+)*)", error.whom):
        return str(WaitTimeout(called(error.whom), error.what, error.seconds))
    return str(error)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
