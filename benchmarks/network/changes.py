"""Which elements of the weights a version changes: drawn at random, and by every rank alike, whatever part of the model it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from asyncmoe.errors import UserError
from asyncmoe.reshard import Piece, RankLayout

MOST_PERCENT = 30.0
"""Of more changes, a delta takes half as many bytes as everything does, and a run sends everything."""
_VALUES = 128
"""A change flips some of the lowest 7 bits, which are bfloat16's fraction: the number stays finite."""


def percents(text: str) -> tuple[float, ...]:
    """Return the percents of `--changed`: of "0.3,1", two; of "", none.

    Raises:
        UserError: one is no number above 0 and at most `MOST_PERCENT`, or comes twice.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    try:
        found = tuple(float(word) for word in words)
    except ValueError:
        found = (0.0,)
    if not all(0 < one <= MOST_PERCENT for one in found) or len({*found}) != len(found):
        raise UserError("--changed", got=text, expected=f"different percents above 0, at most {MOST_PERCENT:g}, as 0.3,1,3")
    return found


def change(
    layout: RankLayout, shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray], version: int, percent: float
) -> int:
    """Change each element of a rank's part of the model with the probability `percent` / 100, in place.

    Args:
        shapes: of the canonical tensors.
        arrays: uint16[elements] by storage name.

    Returns:
        Elements that changed.
    """
    pieces: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        pieces.setdefault(piece.tensor, []).append(piece)
    changed = 0
    for tensor, parts in pieces.items():
        places, flips = _drawn(tensor, int(np.prod(shapes[tensor])), version, percent / 100)
        index = np.unravel_index(places, shapes[tensor])
        for piece in parts:
            start, end = piece.box.start, [s + n for s, n in zip(piece.box.start, piece.box.extent, strict=True)]
            ours = np.ones(len(places), bool)
            for k, at in enumerate(index):
                if end[k] - start[k] < shapes[tensor][k]:
                    ours &= (at >= start[k]) & (at < end[k])
            offsets = np.full(int(ours.sum()), piece.offset)
            for at, first, stride in zip(index, start, piece.strides, strict=True):
                offsets += (at[ours] - first) * stride
            arrays[piece.storage][offsets] ^= flips[ours]
            changed += len(offsets)
    return changed


def _drawn(tensor: str, size: int, version: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return int64[n] and uint16[n]: row-major numbers of the elements that change, ascending, and the bits to flip in each."""
    seed = hashlib.blake2b(f"{tensor} {version}".encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(seed, "little"))
    parts, last = [], -1
    while last < size:
        drawn = last + np.cumsum(generator.geometric(share, max(64, int(size * share * 1.05))))
        parts.append(drawn)
        last = int(drawn[-1])
    places = np.concatenate(parts)
    places = places[places < size]
    return places, generator.integers(1, _VALUES, len(places), dtype=np.uint16)
