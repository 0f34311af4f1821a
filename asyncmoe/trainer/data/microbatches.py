"""The micro-batches of an update, packed when they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from asyncmoe.trainer.data.batch import MicroBatch, Place


class MicroBatches:
    """One data-parallel rank's micro-batches in schedule order.

    Each iteration packs them anew. A thread packs the next one while the current one is computed, so only two are in memory.

    Args:
        make: packs the micro-batch with a given number; called in a thread, one call at a time in each iteration.
        rows: rows of each micro-batch, over all context-parallel ranks together (`MicroBatch.whole`).
        places: `MicroBatch.places` of each.
    """

    def __init__(self, make: Callable[[int], MicroBatch], rows: Sequence[int], places: Sequence[tuple[Place, ...]]) -> None:
        self._make, self.rows, self.places = make, tuple(rows), tuple(places)

    @classmethod
    def of(cls, batches: MicroBatches | Sequence[MicroBatch]) -> MicroBatches:
        """Wrap micro-batches that are already packed."""
        if isinstance(batches, MicroBatches):
            return batches
        return cls(batches.__getitem__, [one.whole for one in batches], [one.places for one in batches])

    def shared(self, readers: int) -> list[Iterator[MicroBatch]]:
        """Return independent iterators. Each micro-batch is packed once, and kept until the last reader has read it."""
        source, waiting = iter(self), [deque[MicroBatch]() for _ in range(readers)]

        def of(own: deque[MicroBatch]) -> Iterator[MicroBatch]:
            for _ in range(len(self)):
                if not own:
                    one = next(source)
                    for each in waiting:
                        each.append(one)
                    del one
                yield own.popleft()

        return [of(own) for own in waiting]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[MicroBatch]:
        with ThreadPoolExecutor(1, thread_name_prefix="micro-batches") as packer:
            coming = packer.submit(self._make, 0)
            for number in range(1, len(self)):
                batch, coming = coming.result(), packer.submit(self._make, number)
                yield batch
            batch = coming.result()
        yield batch
