"""What stands for weights, and the log-probability by which every sampled token tells of the weights and the prefix it came from. Pure.

A version has two parts, one of each trainer rank, so that an engine can hold parts of two versions. The log-probability of a token is a
digest of the version's parts, the tokens before it and the token itself: a mixed version, a lost prefix or a token of another response
cannot hide in a trajectory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np

from asyncmoe.trajectory import Trajectory

FIRST = ("0" * 24, "1" * 24)
"""The parts of version 0, which engines start with."""
_SCALE = 1 << 23
"""-(1 + n / 2^23) is exact in float32 for all n below 2^23."""


def trained(part: str, step: int, batch: str, start: str) -> str:
    """Return a part of the weights after a step: like real ones they depend on the batch, and differ a little when a step is trained again.

    Args:
        batch: digest of the trajectories.
        start: names the trainer's start.
    """
    return blake2b(f"{part} {step} {batch} {start}".encode(), digest_size=12).hexdigest()


def packed(part: str, size: int) -> bytes:
    """Return the bytes that carry a part to an engine."""
    return (part.encode() + b"\0") * (size // (len(part) + 1))


def unpacked(data: bytes, size: int) -> str:
    """Return the part that so many bytes carry; ValueError if they carry none, or pieces of several."""
    part, _, _ = data.partition(b"\0")
    if not part or len(data) != size or packed(part.decode(), size) != data:
        raise ValueError(f"{len(data)} bytes, and {data[:40]!r} does not make all of them")
    return part.decode()


class Sampler:
    """Log-probabilities of the tokens that follow a prefix."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self._digest = blake2b(array("q", prefix).tobytes(), digest_size=8)

    def take(self, token: int, parts: Sequence[str]) -> float:
        """Return the token's log-probability under these weights; the next one follows it."""
        self._digest.update(array("q", (token,)).tobytes())
        said = self._digest.copy()
        said.update(" ".join(parts).encode())
        return -(1.0 + int.from_bytes(said.digest()[:4], "little") % _SCALE / _SCALE)


def faults(one: Trajectory, known: dict[int, set[tuple[str, ...]]]) -> Iterator[str]:
    """Say which sampled tokens of a trajectory no known weights of their version have sampled after the tokens before them.

    Args:
        known: by version: the weights that were ever published under it.
    """
    tokens, sampled = one.tokens.tolist(), one.loss_mask.tolist()
    for place in (place for place, was in enumerate(sampled) if was):
        version, prefix = int(one.versions[place]), tokens[:place]
        candidates = {np.float32(Sampler(prefix).take(tokens[place], parts)) for parts in known.get(version, ())}
        if np.float32(one.logprobs[place]) not in candidates:
            yield f"{one.key}: token {place} of version {version} is not of the {len(candidates)} weights of that version"


def digest(trajectories: Iterable[Trajectory]) -> str:
    """Return a digest of all that a batch is trained on."""
    said = blake2b(digest_size=12)
    for one in trajectories:
        for values in (one.tokens, one.loss_mask, one.logprobs, one.versions):
            said.update(values.tobytes())
        said.update(f"{one.key} {one.reward}".encode())
    return said.hexdigest()
