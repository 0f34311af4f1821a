"""The receiver's half of the delta codec: stores the encoded bytes, verifies that they fit, and scatters them into storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncmoe.errors import InvariantBroken, OutOfDeviceMemory, TransferError
from asyncmoe.reshard.chunks import BUCKET_BYTES
from asyncmoe.reshard.delta_lanes import WORD, DeltaLane, lanes_of
from asyncmoe.reshard.delta_work import Work, work_on
from asyncmoe.reshard.gpu import Relieve, nothing_to_give
from asyncmoe.reshard.memory import Array, addresses_of, check_apart, memories_of, one_device
from asyncmoe.reshard.plan import Plan


@dataclass(eq=False)
class _Source:
    """The data from one source rank.

    Attributes:
        digest: the canonical digest of its elements, as last read from or written to the destination's storages.
        coded: (address, bytes) of each message of the next version.
        proved: the digest that the messages would result in; None: not verified.
    """

    lane: DeltaLane
    digest: int = 0
    coded: list[tuple[int, int]] = field(default_factory=list)
    proved: int | None = None


class DeltaDecoder:
    """This rank's side, as a destination, of an exchange of deltas.

    Call `forget` before a full exchange, and `adopt` after it; `adopt` reads the canonical digest of all elements
    (`asyncmoe.reshard.element_digest`) from the destination. Then, for each version: `expect` allocates memory for the messages, and
    `Exchanger.run` fills it; `prove` checks, while the old weights are still in use, that the messages would turn them into the senders'
    elements; `commit` writes the changed elements straight into the storages.

    Args:
        plan: the plan, or this rank's part of it.
        bucket_bytes, threads, stream, relieve: as for the exchange. If other streams read the weights, make them wait for `commit`, and
            `commit` for them.

    Raises:
        LayoutError: as `lanes_of`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        threads: int = 0,
        stream: int = 0,
        relieve: Relieve = nothing_to_give,
    ) -> None:
        self.rank = rank
        self._how = threads, stream, relieve
        self._storages = plan.destinations.get(rank, {})
        lanes = lanes_of(plan, lambda transfer: transfer.destination == rank, bucket_bytes)
        self._sources = {lane.chunks.source: _Source(lane) for lane in lanes}
        self.version: int | None = None
        """The verified version in the destination; None: there is none, so that the next update must be full."""
        self._work: Work | None = None
        self._bound: object = None
        self._places = np.empty(0, np.int64)

    def bind(self, destination_arrays: Mapping[str, Array]) -> None:
        """Set the arrays of the storages, as for `Exchanger.bind`; they are kept alive until the next `bind`. Keeps the version: the new
        arrays must contain the same bits.

        Raises:
            LayoutError: an array is missing, does not match its storage, or shares memory with another one; or the arrays are on several
                devices.
            UserError: as `GpuWork`.
        """
        found = memories_of(self._storages, destination_arrays, f"rank {self.rank}: destination array", write=True)
        check_apart({}, found)
        device = one_device((memory.device for memory in found.values()), "destination arrays of a delta")
        if self._work is None or self._work.device != device:
            self._work = work_on(device, *self._how)
        self._places, self._bound = addresses_of(found.values()), destination_arrays

    def forget(self) -> None:
        """Drop the version: call this before anything else writes to the arrays, such as a full exchange."""
        self.version = None
        self._let_go(all_=True)

    def adopt(self, version: int, digests: Mapping[int, int]) -> None:
        """Record that the arrays hold `version`, after a full exchange and a check against the senders' digests.

        Args:
            digests: by source rank, the digest that it reports for its elements (`DeltaEncoder.digest`).

        Raises:
            TransferError: the contents differ; the version is then None.
        """
        self.forget()
        for source, one in self._sources.items():
            one.digest = sum(self._there.read(one.lane.table, i, self._places) for i in range(len(one.lane))) & WORD
            if one.digest != digests.get(source):
                raise self._lost(source, f"the bits of version {version} differ from those of rank {source}")
        self.version = version

    def expect(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Allocate memory for the messages of the next version, of `sizes` by source rank; nothing is written to the destination.

        Raises:
            TransferError: there is no memory for them; the version stays.
        """
        self._let_go(all_=False)
        try:
            for source, one in self._sources.items():
                one.coded = [(self._there.room(("coded", source, i), size), size) for i, size in enumerate(sizes[source])]
        except (MemoryError, OutOfDeviceMemory) as error:
            self._let_go(all_=True)
            what = f"no memory for a delta of {sum(map(sum, sizes.values()))} bytes: {error}"
            raise TransferError(self.rank, self.rank, what) from error

    def sizes(self, source: int) -> tuple[int, ...]:
        """Return the sizes in bytes of the messages expected from a source rank, in order."""
        return tuple(nbytes for _, nbytes in self._sources[source].coded)

    def take(self, source: int, number: int, address: int) -> int:
        """Store a copy of a message from an address on the same device, without waiting; return its size in bytes."""
        kept, nbytes = self._sources[source].coded[number]
        self._there.copy(kept, address, nbytes)
        return nbytes

    def prove(self, digests: Mapping[int, int]) -> None:
        """Check that the messages, applied to the current memory, result in the senders' elements. Writes nothing.

        Args:
            digests: as for `adopt`.

        Raises:
            TransferError: they do not; the version is then None, because the fault may be in the memory.
        """
        for source, one in self._sources.items():
            one.proved = (one.digest + self._apply(source, write=False)) & WORD
            if one.proved != digests.get(source):
                raise self._lost(source, "the delta does not turn the current memory into the new version")

    def commit(self, version: int) -> None:
        """Write the verified delta into the destination.

        Raises:
            TransferError: memory has changed since `prove`; the destination may be partly written, and the version is None.
            InvariantBroken: nothing has been verified.
        """
        if self.version is None or any(one.proved is None for one in self._sources.values()):
            raise InvariantBroken(f"rank {self.rank}: got a delta of version {version} to write, expected a verified one")
        self.version = None
        for source, one in self._sources.items():
            one.digest = (one.digest + self._apply(source, write=True)) & WORD
            if one.digest != one.proved:
                raise self._lost(source, "the delta or the weights in memory changed while the delta was written")
        self._let_go(all_=False)
        self.version = version

    @property
    def _there(self) -> Work:
        if self._work is None:
            raise InvariantBroken(f"rank {self.rank}: got a delta decoder without arrays, expected a call of bind first")
        return self._work

    def _apply(self, source: int, *, write: bool) -> int:
        one = self._sources[source]
        try:
            return sum(self._there.apply(one.lane.table, i, *message, self._places, write=write) for i, message in enumerate(one.coded))
        except ValueError as error:
            raise self._lost(source, str(error)) from None

    def _let_go(self, *, all_: bool) -> None:
        for one in self._sources.values():
            one.coded, one.proved = [], None
        if self._work is not None:
            self._work.release(all_=all_)

    def _lost(self, source: int, what: str) -> TransferError:
        self.forget()
        return TransferError(source, self.rank, f"{what}; the next update of this rank must be full")
