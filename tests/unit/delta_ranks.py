"""Ranks that send each other deltas, all in one place, and the canonical digest in plain NumPy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from plan_steps import box_view, carry_out
from reshard_ranks import Arrays

from asyncmoe.reshard import PADDING, DeltaReceiver, DeltaSender, Plan, RankLayout, expected_digest, shard_digest

Shapes = Mapping[str, tuple[int, ...]]
_WORD = (1 << 64) - 1


def oracle_term(name: str, index: int, bits: int) -> int:
    """The term of an element, by the definition, in Python's integers."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=b"asyncmoe tensor").digest(), "little")
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15 + bits) & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def oracle_digest(shapes: Shapes, layout: RankLayout, arrays: Arrays) -> int:
    """The canonical digest of a shard, element by element."""
    total = 0
    for piece in layout.pieces:
        array = arrays[piece.storage]
        raw = array.view(f"u{array.itemsize}")
        bits = box_view(raw, piece.offset * raw.itemsize, np.array(piece.box.extent), np.array(piece.strides) * raw.itemsize)
        for place in np.ndindex(*piece.box.extent):
            if piece.tensor == PADDING:
                name, index = PADDING + piece.storage, piece.offset + sum(i * s for i, s in zip(place, piece.strides, strict=True))
            else:
                name, index = piece.tensor, 0
                for i, start, size in zip(place, piece.box.start, shapes[piece.tensor], strict=True):
                    index = index * size + start + i
            total += oracle_term(name, index, int(bits[place]))
    return total & _WORD


class Ranks:
    """Senders and receivers of a plan, with the sources and destinations that they are bound to.

    `dense` has what an exchange of everything brings, carried out copy by copy with NumPy (for plans without casts).
    """

    def __init__(self, plan: Plan, sources: Mapping[int, Arrays], destinations: Mapping[int, Arrays], **how: int) -> None:
        self.plan, self.sources, self.destinations = plan, sources, destinations
        self.senders = {rank: DeltaSender(plan, rank, threads=2, **how) for rank in sources}
        self.receivers = {rank: DeltaReceiver(plan, rank, threads=2, **how) for rank in destinations}
        for rank, sender in self.senders.items():
            sender.bind(sources[rank])
        for rank, receiver in self.receivers.items():
            receiver.bind(destinations[rank])

    def full(self, version: int) -> None:
        """Everything, copy by copy; then every digest must agree."""
        for sender in self.senders.values():
            sender.full(version)
        carry_out(self.plan, self.sources, self.destinations)
        for rank, receiver in self.receivers.items():
            receiver.adopt(version, self.expected(rank))
        for sender in self.senders.values():
            sender.commit()

    def expected(self, destination: int) -> int:
        """What the senders say that a destination's digest is."""
        return expected_digest(self.plan, destination, [sender.contribution(destination) for sender in self.senders.values()])

    def encode(self, version: int) -> None:
        for sender in self.senders.values():
            assert sender.encode(version) is not None

    def stage(self, destination: int) -> None:
        for source, sender in self.senders.items():
            for message in sender.messages(destination):
                self.receivers[destination].stage(source, message)

    def commit(self, version: int) -> None:
        for rank, receiver in self.receivers.items():
            self.stage(rank)
            expected = self.expected(rank)
            receiver.commit(version)
            assert receiver.digest == expected
        for sender in self.senders.values():
            sender.commit()

    def check(self, shapes: Shapes, layouts: Sequence[RankLayout], *, slow: bool = False) -> None:
        """All destinations are what an exchange of everything brings, and every way to the digest gives the same."""
        dense = {rank: {name: np.full_like(array, 77) for name, array in arrays.items()} for rank, arrays in self.destinations.items()}
        carry_out(self.plan, self.sources, dense)
        for layout in layouts:
            rank, held = layout.rank, self.destinations[layout.rank]
            for name, expected in dense[rank].items():
                assert held[name].tobytes() == expected.tobytes(), name
            digests = {self.receivers[rank].digest, self.expected(rank), shard_digest(shapes, layout, held)}
            if slow:
                digests.add(oracle_digest(shapes, layout, held))
            assert len(digests) == 1


def change(values: np.ndarray, density: float, generator: np.random.Generator) -> None:
    """Change the bits of a share of the elements (0 < density: at least one); 1: of all."""
    raw = values.reshape(-1).view(f"u{values.itemsize}")
    count = min(raw.size, max(int(density > 0), round(density * raw.size)))
    chosen = generator.choice(raw.size, count, replace=False)
    raw[chosen] ^= generator.integers(1, 256, count).astype(raw.dtype)
