"""Groups as objects in the store of a Ray cluster, and an actor of each controller that has their references.

Ray keeps an object as long as somebody refers to it, in the memory of the node of the process that put it, and pulls it to a node that
reads it, once for all ranks there. The actor refers to what is needed. It ends with its controller, and with it all that it referred to; an
object also ends with the process that put it. What is gone is read from the journal.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from asyncmoe.config.queue import QueueSection
from asyncmoe.errors import DataError, StorageError, UserError, gibibytes
from asyncmoe.payloads import packed
from asyncmoe.payloads.packed import HEAD, Asked
from asyncmoe.payloads.store import Found
from asyncmoe.trajectory import Buffer

log = logging.getLogger(__name__)
KEY = "queue.payloads"
_NAMESPACE = "asyncmoe"
_REACH_S = 10.0
"""Seconds for a connection to the cluster's head."""
_ANSWER_S = 30.0
"""Seconds for one request to the actor, or for one trajectory."""
_LEFT_S = 900
"""Seconds, besides those for which `put` waits, after which a group of which the controller does not know was left by a lost process."""
_LONGEST_PAUSE_S = 1.0
_OPENING = threading.Lock()


class RayIndex:
    """The actor: references to the trajectories of each group, by its name."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[dict[str, list[Any]], int, float]] = {}

    def reserve(self, stored: str, nbytes: int, most: int) -> int:
        """Enter a group; return the bytes of the others if there is no room for it, else -1."""
        used = sum(size for name, (_, size, _) in self._groups.items() if name != stored)
        if used + nbytes > most:
            return used
        self._groups.setdefault(stored, ({}, nbytes, time.monotonic()))
        return -1

    def put(self, stored: str, references: dict[str, list[Any]]) -> None:
        """Keep the references of a group that is entered."""
        _, nbytes, since = self._groups[stored]
        self._groups[stored] = references, nbytes, since

    def get(self, asked: list[tuple[str, str]]) -> list[list[Any]]:
        """Return the references of trajectories, by group and key; an empty list for one that is not there."""
        return [self._groups[stored][0].get(key, []) if stored in self._groups else [] for stored, key in asked]

    def delete(self, names: list[str]) -> None:
        """Forget groups."""
        for name in names:
            self._groups.pop(name, None)

    def sweep(self, live: list[str], left_s: float) -> int:
        """Forget groups that are not in `live` and older; return their number."""
        known, now = set(live), time.monotonic()
        left = [name for name, (_, _, since) in self._groups.items() if name not in known and now - since > left_s]
        self.delete(left)
        return len(left)


class RayGroups:
    """A `GroupStore`.

    Args:
        ray: the module, connected.
        max_bytes: bound on all groups of a run.
        full_s: seconds for which a group waits while there is no room.
    """

    def __init__(self, ray: Any, max_bytes: int, full_s: float) -> None:
        self._ray, self._max_bytes, self.full_s = ray, max_bytes, full_s
        self._actors: dict[str, Any] = {}
        self._left_s = full_s + _LEFT_S
        self._ended = threading.Event()

    @classmethod
    def open(cls, section: QueueSection) -> RayGroups:
        """Connect to the cluster that RAY_ADDRESS names, by default this machine's. Blocks; the connection ends with the process.

        Raises:
            UserError: there is none.
        """
        import ray

        with _OPENING:
            if not ray.is_initialized():
                _connect(ray)
        return cls(ray, section.payload_bytes, section.lease_timeout_s)

    def begin(self, run: str) -> str:
        """See `GroupStore`; an earlier controller's groups have ended with it."""
        prefix = f"ray:{run}:{uuid.uuid4().hex[:12]}:"
        name = _actor_of(prefix)
        actor = self._ray.remote(RayIndex).options(name=name, namespace=_NAMESPACE, num_cpus=0, max_concurrency=1)
        self._actors[name] = actor.remote()
        self._ask(prefix, "delete", [])  # it has started
        return prefix

    def put(self, stored: str, frames: Mapping[str, Sequence[Buffer]], until: float | None = None) -> None:
        """See `GroupStore`."""
        pieces = {key: packed.packed(stored, key, one) for key, one in frames.items()}
        nbytes = sum(memoryview(data).nbytes for one in pieces.values() for data in one.values())
        self._refuse_ended()
        self._reserve(stored, nbytes, time.monotonic() + self.full_s if until is None else until)
        try:
            arrays = {key: {name: np.frombuffer(data, np.uint8) for name, data in one.items()} for key, one in pieces.items()}
            references = {key: [self._ray.put(one)] for key, one in arrays.items()}
        except self._ray.exceptions.RayError as error:
            raise self._failed(error) from error
        self._refuse_ended()
        self._ask(stored, "put", stored, references)

    def get(self, asked: Sequence[Asked]) -> Found:
        """See `GroupStore`."""
        found: dict[tuple[str, str], list[Any]] = {}
        for prefix in sorted({_prefix_of(one.stored) for one in asked}):
            names = sorted({(one.stored, one.key) for one in asked if _prefix_of(one.stored) == prefix})
            found |= dict(zip(names, self._ask(prefix, "get", names), strict=True))
        return [self._read(one, found[one.stored, one.key]) for one in asked]

    def delete(self, stored: Sequence[str]) -> None:
        """See `GroupStore`."""
        for prefix in sorted({_prefix_of(one) for one in stored}):
            self._ask(prefix, "delete", [one for one in stored if _prefix_of(one) == prefix])

    def sweep(self, prefix: str, live: Collection[str]) -> int:
        """See `GroupStore`."""
        return int(self._ask(prefix, "sweep", sorted(live), self._left_s))

    def clear(self, prefix: str) -> None:
        """See `GroupStore`."""
        if (actor := self._actors.pop(_actor_of(prefix), None)) is not None:
            self._ray.kill(actor)

    def end(self) -> None:
        """See `GroupStore`."""
        self._ended.set()

    def close(self) -> None:
        """See `GroupStore`."""
        self.end()

    def _reserve(self, stored: str, nbytes: int, until: float) -> None:
        pause_s, bound = 0.01, f"queue.payload_bytes = {gibibytes(self._max_bytes)}"
        if nbytes > self._max_bytes:
            raise StorageError(f"payloads: got a group of {gibibytes(nbytes)}, expected at most {bound}; raise it")
        while (used := int(self._ask(stored, "reserve", stored, nbytes, self._max_bytes))) >= 0:
            said = f"payloads: Ray holds {gibibytes(used)} of the run's groups, and {bound}"
            if time.monotonic() >= until:
                raise StorageError(
                    f"{said}; nothing was freed for {self.full_s:g} s (queue.lease_timeout_s); raise it, or lower queue.capacity"
                )
            self._ended.wait(pause_s)
            self._refuse_ended()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _refuse_ended(self) -> None:
        if self._ended.is_set():
            raise StorageError("payloads: the run ends, and puts nothing more")

    def _read(self, asked: Asked, reference: Sequence[Any]) -> list[Buffer] | DataError:
        try:
            if not reference:
                raise DataError(asked.name, got="nothing", expected="what was put there")
            pieces = self._ray.get(reference[0], timeout=_ANSWER_S)
            views: dict[str, Buffer | None] = {name: memoryview(piece) for name, piece in pieces.items()}
            return packed.unpacked(asked, packed.opened(asked, views.get(HEAD)), views)
        except DataError as error:
            return error
        except self._ray.exceptions.GetTimeoutError as error:
            raise StorageError(f"payloads: Ray did not answer for {_ANSWER_S:g} s; see `ray status`") from error
        except self._ray.exceptions.RayError as error:
            return DataError(asked.name, got=type(error).__name__, expected="what was put there")

    def _ask(self, name: str, method: str, *arguments: Any) -> Any:
        exceptions, actor = self._ray.exceptions, _actor_of(_prefix_of(name))
        try:
            if actor not in self._actors:
                self._actors[actor] = self._ray.get_actor(actor, namespace=_NAMESPACE)
            return self._ray.get(getattr(self._actors[actor], method).remote(*arguments), timeout=_ANSWER_S)
        except exceptions.GetTimeoutError as error:
            raise StorageError(f"payloads: Ray did not answer for {_ANSWER_S:g} s; see `ray status`") from error
        except (exceptions.RayError, ValueError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StorageError:
        why = " ".join((str(error) or type(error).__name__).split())[:300]
        return StorageError(f"payloads: Ray has failed: {type(error).__name__}: {why}; see `ray status`, then start the run again")


def check() -> None:
    """Connect to the cluster, and leave it, unless this process was connected before. Blocks. Raises UserError: there is none."""
    import ray

    with _OPENING:
        if not ray.is_initialized():
            _connect(ray)
            ray.shutdown()


def _connect(ray: Any) -> None:
    """Become a driver of the cluster; this process keeps its handler of SIGTERM."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        _reach(address)
        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        hint = "ray start --head, or set RAY_ADDRESS=HOST:PORT to a cluster's head; queue.payloads=workers needs none"
        got = " ".join(str(error).split())[:200]
        raise UserError(f"{KEY}: Ray cluster at {address}", got=got, expected="one that answers", hint=hint) from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def _reach(address: str) -> None:
    """Connect to HOST:PORT once: Ray itself tries for minutes. Raises OSError, or ValueError if the port is no number."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()


def _prefix_of(stored: str) -> str:
    return ":".join(stored.split(":")[:3]) + ":"


def _actor_of(prefix: str) -> str:
    return prefix.rstrip(":").replace(":", "-")
