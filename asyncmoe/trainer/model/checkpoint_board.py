"""Where the ranks' threads tell each other how a save goes: the store through which the ranks met. No collective of a training thread can
interleave with it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from torch.distributed import distributed_c10d

from asyncmoe.errors import AsyncmoeError
from asyncmoe.trainer.model.checkpoint_progress import Patience, SaveOutcome, Written, state_of

_POLL_S, _POLL_RANK_S, _MOVED_S = 0.02, 0.002, 1.0


class Board:
    """One save's messages. For the thread of a rank.

    Args:
        number: of the save, counted alike by all ranks of the process group.
        limit_s: seconds without any progress of others after which a wait fails.

    Attributes:
        progress: grows while this rank waits for others that get on.
    """

    def __init__(self, number: int, rank: int, world: int, limit_s: float) -> None:
        # A connection of its own: a request that waits in the training thread must not hold up this one.
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()
        self._number, self._rank, self._world, self._limit_s = number, rank, world, limit_s
        self._moved, self._next = 0, 0.0
        self.progress = 0

    def begin(self) -> None:
        """Say that the directory exists. On rank 0."""
        self._store.set(self._key("begun"), b"1")

    def wait_for_begin(self) -> None:
        """Wait for the directory. Raises AsyncmoeError after `limit_s`."""
        self._wait("begun", "made the directory of the checkpoint")

    def moved(self) -> None:
        """Say that work goes on; at most once a second."""
        self._moved += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _MOVED_S
            self._store.set(self._key(f"moved/{self._rank}"), str(self._moved).encode())

    def report(self, written: Written) -> None:
        """Give rank 0 this rank's report."""
        self._store.set(self._key(f"report/{self._rank}"), msgspec.json.encode(written))

    def reports(self) -> Mapping[int, Written]:
        """Wait until all ranks have reported, or one a failure; return the reports. On rank 0.

        Raises:
            AsyncmoeError: nothing has moved for `limit_s`; names the ranks.
        """
        found: dict[int, Written] = {}
        patience, before = Patience(self._limit_s, time.monotonic()), self.progress
        while state_of(found, self._world) == "writing":
            for rank in set(range(self._world)) - found.keys():
                if (payload := self._read(f"report/{rank}")) is not None:
                    found[rank] = msgspec.json.decode(payload, type=Written)
            missing = sorted(set(range(self._world)) - found.keys())
            if patience.over((len(found), [self._read(f"moved/{rank}") for rank in missing]), time.monotonic()):
                named = ", ".join(map(str, missing[:8]))
                raise AsyncmoeError(f"rank{'s' * (len(missing) > 1)} {named} wrote nothing for {self._limit_s:g} s (trainer.timeout_s)")
            self.progress = before + patience.changes
            self.moved()
            time.sleep(_POLL_S + len(missing) * _POLL_RANK_S)
        return found

    def decide(self, verdict: SaveOutcome) -> None:
        """Tell all ranks how the save has ended, and delete what the save before has left. On rank 0."""
        self._store.set(self._key("verdict"), msgspec.json.encode(verdict))
        # The others have reported in this save, so they read nothing of the one before any more. What they may still read must stay: the
        # store's `get` waits for a key that is deleted after `check` has found it.
        ranks = range(self._world)
        for name in ("verdict", "begun", *(f"report/{rank}" for rank in ranks), *(f"moved/{rank}" for rank in ranks)):
            self._store.delete_key(self._key(name, self._number - 1))

    def verdict(self) -> SaveOutcome:
        """Wait for how the save has ended. Raises AsyncmoeError if rank 0 does nothing for `limit_s`."""
        return msgspec.json.decode(self._wait("verdict", "finished the checkpoint"), type=SaveOutcome)

    def _wait(self, name: str, what: str) -> bytes:
        patience, before = Patience(self._limit_s, time.monotonic()), self.progress
        while (found := self._read(name)) is None:
            if patience.over(self._read("moved/0"), time.monotonic()):
                raise AsyncmoeError(f"rank 0 has not {what} for {self._limit_s:g} s (trainer.timeout_s)")
            self.progress = before + patience.changes
            time.sleep(_POLL_S)
        return found

    def _read(self, name: str) -> bytes | None:
        key = self._key(name)
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _key(self, name: str, number: int | None = None) -> str:
        return f"asyncmoe/save/{self._number if number is None else number}/{name}"
