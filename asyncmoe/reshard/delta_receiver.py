"""The receiver of sparse deltas: keeps the coded bytes, proves that they fit, and scatters them into the destination storages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncmoe.errors import InvariantBroken, OutOfDeviceMemory, TransferError
from asyncmoe.reshard.delta_digest import WORD, addresses, padding_table, seeds
from asyncmoe.reshard.delta_format import FRAME_BYTES, DeltaHeader, byte_row, check_version, frame_fault, read_header
from asyncmoe.reshard.delta_held import HeldMemory, Incoming
from asyncmoe.reshard.delta_lanes import MESSAGE_BYTES, lanes_of
from asyncmoe.reshard.delta_work import payload_of
from asyncmoe.reshard.gpu import Relieve, nothing_to_give
from asyncmoe.reshard.layout import MOST_THREADS, whole_number
from asyncmoe.reshard.memory import Array
from asyncmoe.reshard.plan import Plan


class DeltaReceiver:
    """This rank's side, as a destination, of deltas of a plan's messages.

    Around a full update (an `Exchanger`'s), `forget` comes before anything is written, and `adopt` after it, which reads the canonical
    digest (`asyncmoe.reshard.delta_digest`) of everything from the destination. Then, for each version: `stage` takes the messages and
    keeps their coded bytes; `prove` computes, from the old bits as they lie in memory now, whether the version will be what its senders
    have, while the old weights are still in use; `commit` writes the changed elements straight into the storages. Nothing is written
    unless every message of the version is there, whole, made from the version that is held, and proven.

    In arrays on a GPU, kernels prove, write and read (`asyncmoe.reshard.delta_gpu`); staged messages are in pinned host memory.

    Args:
        plan: the plan, or its part of this rank.
        message_bytes: as the senders'.
        limit_bytes: the most that the coded bytes of a version may take here; None: as much as all messages could be at most.
        threads: threads that read and write host memory; 0: as many as the machine has, at most 4.
        stream: for arrays on a GPU, the CUDA stream of all copies and kernels, as for `Exchanger`. Every method waits for its own: order
            `commit` and what reads the weights on other streams with waits on both sides.
        relieve: see `asyncmoe.reshard.gpu.Relieve`.

    Raises:
        LayoutError: `message_bytes` is less than the largest element, `limit_bytes` less than 0, or the rank is no destination of the plan.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        message_bytes: int = MESSAGE_BYTES,
        limit_bytes: int | None = None,
        threads: int = 0,
        stream: int = 0,
        relieve: Relieve = nothing_to_give,
    ) -> None:
        self.rank, self._relieve = whole_number(rank, "rank"), relieve
        self._threads, self._stream = whole_number(threads, "threads", 0, MOST_THREADS), whole_number(stream, "stream")
        self._storages = plan.destinations.get(rank, {})
        seed = seeds(plan.match.sources.tensors, ())
        lanes = lanes_of(plan, lambda transfer: transfer.destination == rank, message_bytes)
        self._incoming = {lane.source: Incoming(lane, lane.stored(seed), [0] * len(lane)) for lane in lanes}
        padding = padding_table(plan, rank, self._storages)
        self._padding_sum = padding.read(0, np.zeros(len(self._storages), np.int64), 1)
        self._memory = HeldMemory(list(self._incoming.values()), padding, threads)
        bounds = (FRAME_BYTES + one.table.bound(i) for one in self._incoming.values() for i in range(len(one.lane)))
        self.limit_bytes = sum(bounds) if limit_bytes is None else whole_number(limit_bytes, "limit_bytes of a delta")
        self.staged_bytes = 0
        """Bytes of the messages that are staged."""
        self.version: int | None = None
        """The version that the destination holds, as far as is known; None: unknown, so that only a full update helps."""
        self._staging: int | None = None
        self._proven = False
        self._bound: object = None
        self._places = np.empty(0, np.int64)

    @property
    def digest(self) -> int:
        """The canonical digest of the shard, as it was read or written last."""
        return (self._padding_sum + sum(sum(one.sums) for one in self._incoming.values())) & WORD

    def bind(self, destination_arrays: Mapping[str, Array]) -> None:
        """Set the arrays of the storages, as for `Exchanger.bind`; they are kept alive until the next `bind`. Forgets what they hold.

        Raises:
            LayoutError: an array is missing, or does not match its storage; they are not all on one device; or they are on a GPU, and this
                build has no CUDA kernels.
            OutOfDeviceMemory: the GPU has no room for the tables.
        """
        self.rebind(destination_arrays)
        self.forget()

    def rebind(self, destination_arrays: Mapping[str, Array]) -> None:
        """Set other arrays, into which the caller has put the same bits. Forgets nothing; `prove` reads the new arrays.

        Raises:
            LayoutError: as `bind`.
        """
        self._places, device = addresses(self._storages, destination_arrays, f"rank {self.rank}: destination array", write=True)
        self._bound = destination_arrays
        self._memory.move(device, self._stream, self._relieve)

    def forget(self) -> None:
        """Hold no version: call before anything else writes to the arrays, as a full update does."""
        self.version = None
        self.abandon()

    def adopt(self, version: int, expected: int | None = None) -> int:
        """Take what the arrays hold as a version, after a full update; return its canonical digest, read from them.

        Args:
            expected: the digest that they must have (`expected_digest`).

        Raises:
            TransferError: they have another digest, or padding that is not zero; no version is held then.
            LayoutError: `version` is no number of 64 bits.
        """
        check_version(version)
        self._check_bound()
        self.forget()
        self._check_padding()
        for one in self._incoming.values():
            one.sums = [one.elements.read(i, self._places) for i in range(len(one.lane))]
        if expected is not None and self.digest != expected:
            raise self._refusal(self.rank, f"version {version} has digest {self.digest:016x}, but its senders have {expected:016x}")
        self.version = version
        return self.digest

    def message_bytes(self, source: int, header: np.ndarray) -> int:
        """Return the size of a message whose first `HEADER_BYTES` bytes (uint8) have come; memory may be taken for it.

        Raises:
            TransferError: as `stage`, as far as the header shows it; nothing remains staged.
            LayoutError: `header` is no array of uint8.
        """
        found = self._header(source, byte_row(header))
        return FRAME_BYTES + found.payload

    def stage(self, source: int, message: np.ndarray, *, owned: bool = False) -> None:
        """Keep a copy of a message, uint8[n], from a source rank, and check that copy: the caller's memory may be written meanwhile, as a
        slot is that both ends share. Nothing is written to the destination.

        Args:
            owned: nobody writes to the message any more, so that it may be kept itself.

        Raises:
            LayoutError: `message` is no array of uint8.
            TransferError: it is truncated, damaged, repeated, of another plan, lane or version, made from another base than the one held,
                or too large; or its numbers or positions do not fit the plan. Nothing remains staged.
        """
        theirs = byte_row(message)
        expected = FRAME_BYTES + self._header(source, theirs).payload
        if len(theirs) != expected:
            raise self._refusal(source, f"message of a delta: got {len(theirs)} bytes, expected {expected}")
        try:
            kept = self._memory.keep(theirs, owned)
        except MemoryError as error:
            raise self._refusal(source, f"message of a delta: no host memory for its {len(theirs)} bytes: {error}") from error
        header = self._header(source, kept)  # again: what was read before may have been overwritten
        one = self._incoming[source]
        if (wrong := frame_fault(kept, header)) is None:
            wrong = one.table.fault(header.number, *payload_of(kept), self._threads)
        if wrong is not None:
            raise self._refusal(source, f"message {header.number + 1} of a delta: {wrong}")
        one.staged[header.number] = header, kept
        self.staged_bytes += len(kept)
        self._staging = header.version

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(source rank, number) of the messages that are not staged."""
        return [(source, i) for source, one in self._incoming.items() for i in range(len(one.lane)) if i not in one.staged]

    @property
    def staged_digest(self) -> int:
        """The canonical digest that the shard will have when what is staged is written."""
        staged = (
            one.staged[i][0].after if i in one.staged else one.sums[i] for one in self._incoming.values() for i in range(len(one.lane))
        )
        return (self._padding_sum + sum(staged)) & WORD

    def prove(self, version: int) -> None:
        """Check that the staged messages, applied to what lies in memory now, give the version that their senders have. Writes nothing.

        Raises:
            TransferError: they do not; nothing remains staged, and no version is held, because it is the memory that differs.
            InvariantBroken: messages of the version are missing.
        """
        self._check_complete(version)
        self._apply(write=False)
        self._proven = True

    def commit(self, version: int) -> None:
        """Write the staged version into the destination, after `prove` unless that was called since the last `stage`.

        Raises:
            TransferError: as `prove`; or memory changed since: the destination may be partly written then, and no version is held.
            InvariantBroken: messages of the version are missing.
        """
        self._check_complete(version)
        if not self._proven:
            self.prove(version)
        self.version = None
        self._apply(write=True)
        for one in self._incoming.values():
            one.sums = [one.staged[i][0].after for i in range(len(one.lane))]
        self.abandon()
        self.version = version

    def abandon(self) -> None:
        """Let go of what is staged. What the destination holds stays."""
        for one in self._incoming.values():
            one.staged.clear()
        self._memory.let_go()
        self.staged_bytes, self._staging, self._proven = 0, None, False

    def _header(self, source: int, message: np.ndarray) -> DeltaHeader:
        found = read_header(message)
        if not isinstance(found, str):
            if (wrong := self._header_fault(source, found)) is None:
                return found
            found = wrong
        raise self._refusal(source, f"message of a delta: {found}")

    def _header_fault(self, source: int, header: DeltaHeader) -> str | None:
        """Return why a message of this header is not acceptable now, or None."""
        one = self._incoming.get(source)
        if one is None or header.lane != one.lane.identity or header.messages != len(one.lane) or header.number >= len(one.lane):
            return "got one of another plan, or of other ranks, expected one of this plan"
        if self.version is None or header.base != self.version:
            return f"got a change of version {header.base}, expected one of {self.version}, the version that is held"
        if header.version == self.version or self._staging not in (None, header.version):
            return f"got version {header.version}, expected {'a later one' if self._staging is None else self._staging}"
        if header.number in one.staged:
            return f"got number {header.number + 1} twice, expected it once"
        if header.before != one.sums[header.number]:
            return f"got one made from digest {header.before:016x}, expected {one.sums[header.number]:016x}, which is held"
        most = min(one.table.bound(header.number), self.limit_bytes - self.staged_bytes - FRAME_BYTES)
        return f"got {header.payload} bytes, expected at most {most}" if header.payload > most else None

    def _apply(self, *, write: bool) -> None:
        for source, one in self._incoming.items():
            for i in range(len(one.lane)):
                header, message = one.staged[i]
                try:
                    change = one.elements.apply(i, message, self._places, write=write)
                except OutOfDeviceMemory as error:
                    raise self._refusal(source, str(error)) from error
                except ValueError as error:  # it was whole when it was staged
                    raise self._lost(source, f"message {i + 1} of {len(one.lane)} of a delta changed in memory: {error}") from None
                if (one.sums[i] + change) & WORD != header.after:
                    what = f"message {i + 1} of {len(one.lane)} of a delta does not make version {header.version} of what lies in memory"
                    raise self._lost(source, what)

    def _check_padding(self) -> None:
        if self._memory.padding.read(0, self._places) != self._padding_sum:
            raise self._lost(self.rank, "padding is not zero")

    def _check_bound(self) -> None:
        if self._bound is None and self._storages:
            raise InvariantBroken(f"rank {self.rank}: got a receiver of deltas without arrays, expected bind before it")

    def _check_complete(self, version: int) -> None:
        self._check_bound()
        missing = self.missing
        if missing or self._staging not in (None, version) or self.version is None:
            first = f", the first {missing[0][1] + 1} from rank {missing[0][0]}" if missing else ""
            staged = "nothing" if self._staging is None else f"version {self._staging}"
            held = f"made from {self.version}; {staged} is staged, {len(missing)} messages are missing{first}"
            raise InvariantBroken(f"rank {self.rank}: got version {version} to prove or commit, expected a whole one, {held}")

    def _refusal(self, source: int, what: str) -> TransferError:
        self.abandon()
        return TransferError(source, self.rank, what)

    def _lost(self, source: int, what: str) -> TransferError:
        self.forget()
        return TransferError(source, self.rank, f"{what}; the next update of this rank must be full")
