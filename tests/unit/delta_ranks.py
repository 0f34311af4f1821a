"""Ranks that exchange deltas within one process, and the canonical digest in plain NumPy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from plan_steps import carry_out
from reshard_ranks import Arrays, view
from test_reshard_copy import mix

from asyncmoe.reshard import PADDING, DeltaDecoder, DeltaEncoder, DeltaSize, Plan, RankLayout

Shapes = Mapping[str, tuple[int, ...]]
Messages = dict[int, list[np.ndarray]]
Where = Callable[[Arrays], Any]
_WORD = (1 << 64) - 1


def oracle_term(name: str, index: int, bits: int) -> int:
    """The term of an element, by the definition, in Python's integers."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=b"asyncmoe tensor").digest(), "little")
    return mix((seed + (index + 1) * 0x9E3779B97F4A7C15 + bits) & _WORD)


def oracle_digest(shapes: Shapes, layout: RankLayout, arrays: Arrays) -> int:
    """The canonical digest of a shard, element by element."""
    total = 0
    for piece in layout.pieces:
        array = arrays[piece.storage]
        if piece.tensor == PADDING:
            continue
        bits = view(array.view(f"u{array.itemsize}"), piece)
        for place in np.ndindex(*piece.box.extent):
            index = 0
            for i, start, size in zip(place, piece.box.start, shapes[piece.tensor], strict=True):
                index = index * size + start + i
            total += oracle_term(piece.tensor, index, int(bits[place]))
    return total & _WORD


class Ranks:
    """Encoders and decoders of a plan, with the sources and destinations that they are bound to.

    `dense` has what an exchange of everything brings, carried out copy by copy with NumPy (for plans without casts).
    """

    def __init__(
        self, plan: Plan, sources: Mapping[int, Arrays], destinations: Mapping[int, Arrays], there: Where = dict, **how: int
    ) -> None:
        self.plan, self.sources, self.destinations = plan, sources, destinations
        self.senders = {rank: DeltaEncoder(plan, rank, threads=2, **how) for rank in sources}
        self.receivers = {rank: DeltaDecoder(plan, rank, threads=2, **how) for rank in destinations}
        for rank, sender in self.senders.items():
            sender.bind(there(sources[rank]))
        for rank, receiver in self.receivers.items():
            receiver.bind(there(destinations[rank]))

    def full(self, version: int) -> None:
        """Everything, copy by copy; then every digest must agree."""
        for sender in self.senders.values():
            sender.full(version)
        carry_out(self.plan, self.sources, self.destinations)
        for rank, receiver in self.receivers.items():
            receiver.adopt(version, self.digests(rank))

    def digests(self, destination: int) -> dict[int, int]:
        return {rank: sender.digest(destination) for rank, sender in self.senders.items()}

    def encode(self, version: int) -> list[DeltaSize]:
        sizes = [sender.encode(version, limit_bytes=1 << 40) for sender in self.senders.values()]
        return [size for size in sizes if size is not None]

    def messages(self, destination: int) -> Messages:
        """Copies of what was coded for a destination, by source rank."""
        found: Messages = {}
        for rank, sender in self.senders.items():
            if sizes := sender.sizes(destination):
                found[rank] = [np.empty(size, np.uint8) for size in sizes]
                for number, message in enumerate(found[rank]):
                    sender.put(destination, number, int(message.ctypes.data))
        return found

    def receive(self, destination: int, messages: Messages) -> None:
        """Bring messages to a decoder, and have it prove them."""
        receiver = self.receivers[destination]
        receiver.expect({source: [len(one) for one in several] for source, several in messages.items()})
        for source, several in messages.items():
            for number, message in enumerate(several):
                receiver.take(source, number, int(message.ctypes.data))
        receiver.prove(self.digests(destination))

    def update(self, version: int) -> None:
        """Code, bring, prove and write a delta."""
        self.encode(version)
        for rank, receiver in self.receivers.items():
            self.receive(rank, self.messages(rank))
            receiver.commit(version)

    def check(self, shapes: Shapes, layouts: Sequence[RankLayout], *, slow: bool = False) -> None:
        """Check that all destinations equal a full exchange, and that the digest matches its definition."""
        dense = {rank: {name: np.full_like(array, 77) for name, array in arrays.items()} for rank, arrays in self.destinations.items()}
        carry_out(self.plan, self.sources, dense)
        for layout in layouts:
            rank, held = layout.rank, self.destinations[layout.rank]
            for name, expected in dense[rank].items():
                assert held[name].tobytes() == expected.tobytes(), name
            if slow:
                assert sum(self.digests(rank).values()) & _WORD == oracle_digest(shapes, layout, held)


def change(values: np.ndarray, density: float, generator: np.random.Generator) -> None:
    """Change the bits of a share of the elements (0 < density: at least one); 1: of all."""
    raw = values.reshape(-1).view(f"u{values.itemsize}")
    count = min(raw.size, max(int(density > 0), round(density * raw.size)))
    chosen = generator.choice(raw.size, count, replace=False)
    raw[chosen] ^= generator.integers(1, 256, count).astype(raw.dtype)
