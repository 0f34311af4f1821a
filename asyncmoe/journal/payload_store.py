"""What the journal asks of a store of payloads. `Segments` keeps them in files, `RedisPayloads` in Redis."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from asyncmoe.journal.segment_format import Place
from asyncmoe.trajectory import Buffer


class PayloadStore(Protocol):
    """Payloads, each with a checksum, in numbered segments that are deleted as a whole.

    `append`, `read`, `retain` and `size` may be called from any thread, `room` and `durable` from any event loop.
    """

    async def room(self, nbytes: int) -> None:
        """Wait until `append` takes a payload of so many bytes; true until the caller's next `await`. Raises StorageError."""
        ...

    def append(self, parts: Sequence[Buffer]) -> Place:
        """Hand over a payload, whose parts nobody may change before it is durable, and return its place. Never waits.

        Raises:
            StorageError: the store failed, is full, or has not kept enough of what it was given (`room` waits for that).
        """
        ...

    async def durable(self, place: Place) -> None:
        """Wait until a payload is on disk. Raises StorageError."""
        ...

    def read(self, place: Place) -> bytearray:
        """Read a payload that is durable, and verify its checksum. Blocks.

        Raises:
            DataError: it is damaged or absent.
        """
        ...

    def recorded(self) -> Iterator[Place]:
        """Find the whole payloads that were there when the store was opened, in the order in which they were appended. Blocks."""
        ...

    def retain(self, live: Iterable[int], below: int | None = None) -> int:
        """Delete the segments that are not in `live` and whose number is less than `below` (None: any). Return the freed bytes. Blocks.

        A segment that is being written stays. Raises StorageError.
        """
        ...

    def retain_left(self, live: Mapping[int, Collection[int]], writers: int) -> int:
        """Delete the segments that writers with numbers above `writers` have left and that are not in `live`. Return the freed bytes.

        Args:
            live: numbers of the segments that are needed, by writer.

        Raises:
            StorageError: one could not be deleted.
        """
        ...

    @property
    def size(self) -> int:
        """Bytes of the payloads, those included that are not yet written."""
        ...

    @property
    def newest(self) -> int:
        """Segment of the payload that was appended last; before the first, of the one that will be."""
        ...

    def close(self) -> None:
        """Write what was appended, and let go of the store. Blocks. Raises StorageError or WaitTimeout."""
        ...
