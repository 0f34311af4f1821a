"""What a store of payloads does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from asyncmoe.errors import DataError
from asyncmoe.payloads.packed import Asked
from asyncmoe.trajectory import Buffer

Found = Sequence[list[Buffer] | DataError]
"""Of each trajectory its frames (`asyncmoe.trajectory.part`), or what is wrong with what the store has."""


class GroupStore(Protocol):
    """The trajectories of groups, under a name for each group. Blocks; methods may be called from any thread.

    All raise StorageError if the store does not answer within its bound, and UserError if it refuses the user.

    Attributes:
        full_s: seconds for which a group waits while the store is full.
    """

    full_s: float

    def begin(self, run: str) -> str:
        """Delete what earlier controllers of a run have left, and return how names of this one's groups begin."""
        ...

    def put(self, stored: str, frames: Mapping[str, Sequence[Buffer]], until: float | None = None) -> None:
        """Keep a group; return once it can be read. Waits while the store is full. Putting it again changes nothing.

        Args:
            stored: its name: what `begin` returned, and more.
            frames: of `asyncmoe.trajectory.encode`, by the key of the trajectory. Not changed by anybody until this returns.
            until: `time.monotonic()` at which it waits no longer for room; None: in `full_s`.

        Raises:
            StorageError: it remained full, or `end` was called, too.
        """
        ...

    def get(self, asked: Sequence[Asked]) -> Found:
        """Read trajectories, and check that they are what was put, whole."""
        ...

    def delete(self, stored: Sequence[str]) -> None:
        """Delete groups; those that are not there, too."""
        ...

    def sweep(self, prefix: str, live: Collection[str]) -> int:
        """Look after the store: delete what was put and of which nobody knows any more. Return how much was deleted.

        Args:
            prefix: what `begin` returned.
            live: names of the groups that are kept; what is not here and lies there for a while was left by a lost process.

        Raises:
            UserError: the store may have begun to drop what it holds.
        """
        ...

    def clear(self, prefix: str) -> None:
        """Delete all groups of the run that are no newer controller's, and if none is left, all that the store has of the run."""
        ...

    def end(self) -> None:
        """Have each `put` fail at its next request, also one that waits; the rest goes on."""
        ...

    def close(self) -> None:
        """Let go of the store, and end all waiting."""
        ...
