"""Carry messages whose sizes both ends know beforehand, and which differ from run to run, in pieces through buffers of bounded size."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.gpu import HostCopies
from asyncmoe.reshard.layout import seconds, whole_number
from asyncmoe.reshard.memory import memory_of
from asyncmoe.reshard.transport import Buffer, Lane, Link, MessageLink, SharedTransport, Transport, Watch, nothing_to_watch

PIECE_BYTES = 1 << 20
_SMALL_PIECE_BYTES, _PIECES = 64 << 10, 8
"""A message of less than `_PIECES` pieces is cut into so many, though not into smaller ones than the first: the buffers of a small message
should be smaller than itself."""
_SLOTS = 2
BUFFERED_BYTES = _SLOTS * PIECE_BYTES
"""Bytes of the buffers for each pair of ranks, unless `piece_bytes` is given."""
Take = Callable[[int, np.ndarray], None]
"""Called with the source rank and a whole message, uint8[n], which it may keep."""


class Carrier:
    """One rank's end of a way for messages in host memory, besides those of an exchange. All ranks of the way make one.

    Memory: two buffers of at most `piece_bytes` for each peer, and during a run one incoming message of each source. A transport between
    GPUs carries pieces through buffers on the device: each is copied there, sent, and copied back, one after another.

    Args:
        transport: nothing else is under way over it while the carrier is made, or runs. Between GPUs a `SharedTransport`, or one that
            waits for its messages (`Transport.waits`).
        destinations, sources: the ranks to which, and from which, messages may go.
        piece_bytes: the same on all ranks.
        timeout_s: how long to wait for a peer to connect.
        watch: as for `Exchanger`.

    Raises:
        WaitTimeout, TransferError: a peer did not connect, or there is no memory to connect in.
        OutOfDeviceMemory: the GPU has no room for the buffers.
        LayoutError: the transport enqueues messages on a GPU's stream and does not wait for them.
    """

    def __init__(
        self,
        transport: Transport | SharedTransport,
        destinations: Sequence[int],
        sources: Sequence[int],
        *,
        piece_bytes: int = PIECE_BYTES,
        timeout_s: float = 300.0,
        watch: Watch = nothing_to_watch,
    ) -> None:
        self._piece_bytes, self._watch, timeout_s = whole_number(piece_bytes, "piece_bytes", 1), watch, seconds(timeout_s)
        self._destinations, self._sources = list(destinations), list(sources)
        self._transport: Transport | None = None
        self._shared: Link | None = None
        if isinstance(transport, SharedTransport):
            out, into = ([Lane(rank, (piece_bytes,) * _SLOTS, piece_bytes) for rank in ranks] for ranks in (destinations, sources))
            self._shared = transport.connect(out, into, _SLOTS, timeout_s)
            device = getattr(self._shared, "device", "cpu")
        else:
            device = memory_of(transport.empty(1), "message buffer").device if destinations or sources else "cpu"
            self._transport = transport if device == "cpu" else _Kept(transport, len(destinations) + len(sources), piece_bytes)
        self._copies = None if device == "cpu" else HostCopies(device)

    def run(
        self, outgoing: Mapping[int, Sequence[np.ndarray]], incoming: Mapping[int, Sequence[int]], take: Take, timeout_s: float = 300.0
    ) -> None:
        """Send and receive messages; those of a pair of ranks arrive in order. All ranks that have messages for each other call it.

        Args:
            outgoing: messages, uint8[n] with n > 0, by destination rank. They are not written.
            incoming: the sizes in bytes, which the caller has bounded, by source rank.
            take: what it raises ends the run. After any error the carrier cannot be used again.
            timeout_s: bound of the run, though a piece that was begun in time may take as long again.

        Raises:
            TransferError: a peer is gone.
            WaitTimeout: a peer made no progress in time.
            LayoutError: a size is less than 1, or a rank is none of those that the carrier was made for.
        """
        until = time.monotonic() + seconds(timeout_s)
        if strangers := {*outgoing} - {*self._destinations} | {*incoming} - {*self._sources}:
            raise LayoutError("ranks of messages", got=f"rank {min(strangers)}", expected="ranks that the carrier was made for")
        out = {rank: _parts(several, self._piece(list(map(len, several)))) for rank, several in outgoing.items()}
        into = {rank: _Arriving(rank, sizes, self._piece(sizes), take) for rank, sizes in incoming.items()}
        out, into = {rank: one for rank, one in out.items() if one}, {rank: one for rank, one in into.items() if one.pieces}
        if self._transport is None:
            if self._shared is not None:
                self._move(self._shared, self._destinations, self._sources, out, into, until)
            return
        if isinstance(self._transport, _Kept):
            self._transport.begin()
        lanes = [_lane(rank, [len(piece) for piece in pieces]) for rank, pieces in out.items()]
        link = MessageLink(self._transport, lanes, [_lane(rank, one.pieces) for rank, one in into.items()], _SLOTS, True, self._watch)
        try:
            self._move(link, list(out), list(into), out, into, until)
        finally:
            link.close()

    def close(self) -> None:
        """Release the memory. Peers that still wait notice."""
        if self._shared is not None:
            self._shared.close()

    def _piece(self, sizes: Sequence[int]) -> int:
        """Return the bytes of a piece of a pair's messages, which both ends know."""
        return min(self._piece_bytes, max(_SMALL_PIECE_BYTES, max(sizes, default=0) // _PIECES))

    def _move(
        self,
        link: Link,
        destinations: list[int],
        sources: list[int],
        out: Mapping[int, list[np.ndarray]],
        into: Mapping[int, _Arriving],
        until: float,
    ) -> None:
        """Move all pieces; lane i of the link goes to the i-th destination, or comes from the i-th source."""

        def left() -> float:
            return max(0.001, until - time.monotonic())

        def at(number: int) -> int:
            return number if self._shared is None else number % _SLOTS  # a shared link has as many messages as slots, again and again

        rounds, ahead = max([0, *map(len, out.values()), *(len(one.pieces) for one in into.values())]), _SLOTS - 1
        for number in range(rounds + ahead if rounds else 0):
            for lane, rank in enumerate(destinations):
                if number < len(out.get(rank, ())):
                    piece = out[rank][number]
                    self._put(link.pack_into(lane, at(number), left()), piece, left())
                    link.post(lane, at(number))
            if number < rounds:
                link.close_round(at(number), left())
            for lane, rank in enumerate(sources):
                if rank in into and 0 <= number - ahead < len(into[rank].pieces):
                    taken = self._taken(link.unpack_from(lane, at(number - ahead), left()), into[rank].pieces[number - ahead], left())
                    into[rank].piece(taken)
                    link.release(lane, at(number - ahead))
        link.finish(left())

    def _put(self, buffer: Buffer, piece: np.ndarray, timeout_s: float) -> None:
        """Copy a piece to the beginning of a message buffer."""
        if self._copies is None:
            _bytes_of(buffer)[: len(piece)] = piece
        else:
            self._copies.run(memory_of(buffer, "message buffer", write=True).address, int(piece.ctypes.data), len(piece), timeout_s)

    def _taken(self, buffer: Buffer, nbytes: int, timeout_s: float) -> np.ndarray:
        """Return the piece at the beginning of a message buffer, in host memory."""
        if self._copies is None:
            return _bytes_of(buffer)[:nbytes]
        found = np.empty(nbytes, np.uint8)
        self._copies.run(int(found.ctypes.data), memory_of(buffer, "message buffer").address, nbytes, timeout_s)
        return found


class _Kept:
    """A transport between GPUs whose buffers are allocated once: freeing device memory waits for all kernels of the device."""

    def __init__(self, transport: Transport, peers: int, piece_bytes: int) -> None:
        if not getattr(transport, "waits", False):
            got = f"{type(transport).__name__}, which only enqueues them"
            raise LayoutError("transport of a delta's messages between GPUs", got=got, expected="one that waits for its messages")
        self.rank, self._transport = transport.rank, transport
        self._buffers = [transport.empty(piece_bytes) for _ in range(_SLOTS * peers)]
        self._free: list[Buffer] = []

    def begin(self) -> None:
        """Make all buffers free: no run is under way."""
        self._free = list(self._buffers)

    def empty(self, nbytes: int) -> Buffer:
        return self._free.pop()[:nbytes]

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]], timeout_s: float) -> None:
        self._transport.exchange(sends, receives, timeout_s)


class _Arriving:
    """The messages of one source rank, put together from their pieces.

    Attributes:
        pieces: bytes of each piece of all messages.
    """

    def __init__(self, source: int, sizes: Sequence[int], piece_bytes: int, take: Take) -> None:
        self._source, self._sizes, self._take = source, list(sizes), take
        self.pieces = [end - start for size in self._sizes for start, end in _edges(size, piece_bytes)]
        self._message, self._filled = np.empty(0, np.uint8), 0

    def piece(self, piece: np.ndarray) -> None:
        """Take the next piece, which the caller may write again."""
        if self._filled == 0:
            self._message = np.empty(self._sizes.pop(0), np.uint8)
        begin, self._filled = self._filled, self._filled + len(piece)
        self._message[begin : self._filled] = piece
        if self._filled == len(self._message):
            message, self._message, self._filled = self._message, np.empty(0, np.uint8), 0
            self._take(self._source, message)


def _parts(messages: Sequence[np.ndarray], piece_bytes: int) -> list[np.ndarray]:
    return [message[start:end] for message in messages for start, end in _edges(len(message), piece_bytes)]


def _edges(nbytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    nbytes = whole_number(nbytes, "bytes of a message", 1)
    return [(start, min(nbytes, start + piece_bytes)) for start in range(0, nbytes, piece_bytes)]


def _lane(peer: int, sizes: Sequence[int]) -> Lane:
    return Lane(peer, tuple(sizes), max(sizes))


def _bytes_of(buffer: Buffer) -> np.ndarray:
    """Return a message buffer in host memory as uint8[n]."""
    memory = memory_of(buffer, "message buffer", write=True)
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.address))
