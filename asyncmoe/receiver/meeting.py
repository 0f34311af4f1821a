"""Where the sender's and the receivers' ranks meet: a key-value store kept by the trainer's rank 0, and process groups made over it.

Ranks of the trainer come first, then those of all engines. Everything but the weights themselves goes through the store, so a
receiver waits for its next update without touching the process group, and a sender that dies is noticed at once.

    terms               rank 0      what there is: both sides plan from it, each rank alone
    ready/R             others      R has planned, and what parameters it has; or why not
    verdict             rank 0      whether all agree
    N/header            rank 0      update N begins, in process group `epoch`
    N/sent/S, N/staged/R            digests of what trainer rank S sent and of what engine rank R holds; or why not
    N/failed            anyone      set with the former when it says why not, so that nobody has to wait for the others
    N/complete          rank 0      whether all bytes have arrived as they were sent
    N/end               rank 0      how the update ended
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncmoe.errors import WaitTimeout, WeightSyncError

T = TypeVar("T", bound=msgspec.Struct)
_POLL_S = 0.002
_c10d: Any = distributed_c10d


class EngineRanks(msgspec.Struct, frozen=True):
    """An engine: `tp` ranks from `first` on."""

    name: str
    tp: int
    ep: int
    first: int


class Terms(msgspec.Struct, frozen=True):
    """All that a rank needs to plan.

    Attributes:
        trainer: fields of `asyncmoe.models.MegatronParallel`.
        dtype: of the weights, the same on both sides.
        timeout_s: bound of an update's staging, and of the meeting.
    """

    hf: dict[str, Any]
    trainer: dict[str, int | bool | None]
    engines: tuple[EngineRanks, ...]
    dtype: str
    bucket_bytes: int
    timeout_s: float

    @property
    def world(self) -> int:
        return self.engines[-1].first + self.engines[-1].tp


class Parameter(msgspec.Struct, frozen=True):
    """A parameter as an engine has it. `shares` is the parameter before it with the same storage."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    shares: str = ""


class Ready(msgspec.Struct, frozen=True):
    """A rank has planned. What only engines have is empty of a trainer's rank."""

    failure: str = ""
    plan: str = ""
    """Digest of all buckets' plans."""
    parameters: dict[str, Parameter] = {}
    places: dict[str, int] = {}
    """SGLang's own "tp_rank", "moe_ep_rank"."""


class Header(msgspec.Struct, frozen=True):
    """An update begins; or, with a failure, it does not."""

    version: int
    epoch: int
    failure: str = ""


class Moved(msgspec.Struct, frozen=True):
    """Digest of all messages exchanged with each other rank in an update, by that rank; or why there are none."""

    failure: str = ""
    digests: dict[int, str] = {}


class Outcome(msgspec.Struct, frozen=True):
    """What rank 0 says of something that all wait for; without a failure it went well."""

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
            raise WeightSyncError(f"{self._peer} is gone: {_first_line(error)}") from error

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
            raise WeightSyncError(f"{self._peer} is gone: {_first_line(error)}") from error

    def get_all(self, keys: Mapping[str, str], kind: type[T], timeout_s: float, failed: str = "failed") -> dict[str, T]:
        """The values of keys, when all are there; or those there are, as soon as `failed` is.

        Args:
            keys: key -> who sets it.

        Raises:
            WaitTimeout: naming whose are missing.
            WeightSyncError: rank 0 is gone.
        """
        until = time.monotonic() + timeout_s
        missing = dict(keys)
        while missing:
            over = self.has(failed) or time.monotonic() > until
            missing = {key: whom for key, whom in missing.items() if not self.has(key)}
            if over:
                break
            time.sleep(_POLL_S)
        if missing and not self.has(failed):
            raise WaitTimeout(", ".join(missing.values()), next(iter(missing)), timeout_s)
        return {key: self.get(key, kind, 1.0) for key in keys if key not in missing}

    def fail(self, number: int, key: str, value: msgspec.Struct) -> None:
        """Set a value that says why an update cannot go on."""
        self.put(key, value)
        self.put(f"{number}/failed", Outcome())

    def forget(self, number: int, terms: Terms) -> None:
        """Drop what is left of an update that all ranks have done with."""
        # Headers stay: a receiver that slept finds the newest by them.
        names = [f"{number}/{name}" for name in ("failed", "complete", "end")]
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
        try:
            store = _c10d.PrefixStore(f"group{epoch}", self._store)
            group: dist.ProcessGroup = _c10d.ProcessGroupGloo(store, self.rank, world, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            waited = time.monotonic() - began
            if waited < timeout_s:
                raise WeightSyncError(f"rank {self.rank}: joining weight group {self._group}: {_first_line(error)}") from error
            raise WaitTimeout("the other ranks", f"join weight group {self._group} ({_first_line(error)})", waited) from error
        return group

    def has(self, key: str) -> bool:
        """Raises WeightSyncError when rank 0 is gone."""
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise WeightSyncError(f"{self._peer} is gone: {_first_line(error)}") from error


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of `host`, for rank 0 to hand to its `Store`."""
    return socket.create_server((host, 0))


def moved_keys(number: int, terms: Terms) -> dict[str, str]:
    """Keys of what every rank moved in an update, and who sets them."""
    senders = {f"{number}/sent/{rank}": f"trainer rank {rank}" for rank in range(terms.engines[0].first)}
    return senders | {f"{number}/staged/{rank}": whom for rank, whom in engine_ranks(terms).items()}


def engine_ranks(terms: Terms) -> dict[int, str]:
    """Every engine rank and what messages call it."""
    return {engine.first + tp: f"{engine.name} rank {tp}" for engine in terms.engines for tp in range(engine.tp)}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
