"""Buckets: tensors laid one after another in a flat array, sent as a single message."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from asyncmoe.reshard.layout import Piece, RankLayout, Storage

STORAGE = "bucket"
"""Name of the one storage of a bucket's layout."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype in the flat array `layout.storages[STORAGE]`.

    Attributes:
        names: names of the tensors, in their order in the array.
        dtypes: dtype of each tensor, by torch's name without `torch.`; all are equal.
        shapes: shape of each tensor.
        nbytes: size of the flat array.
        layout: the layout of the tensors in the array.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    layout: RankLayout


def buckets(layout: RankLayout, bucket_bytes: int, glued: Container[str] = ()) -> list[Bucket]:
    """Cut a layout's storages into buckets of at most `bucket_bytes`.

    Storages are grouped by dtype and otherwise keep their order; a storage larger than `bucket_bytes` gets its own bucket.

    Args:
        glued: storages that must be in the same bucket as the preceding storage of their dtype.
    """
    pieces = layout.pieces_by_storage
    return [_bucket(layout, names, pieces) for names in _groups(layout, bucket_bytes, glued)]


def _groups(layout: RankLayout, bucket_bytes: int, glued: Container[str]) -> Iterator[list[str]]:
    for dtype in dict.fromkeys(storage.dtype for storage in layout.storages.values()):
        group: list[str] = []
        filled = 0
        for names, nbytes in _inseparable(layout, dtype, glued):
            if group and filled + nbytes > bucket_bytes:
                yield group
                group, filled = [], 0
            group += names
            filled += nbytes
        yield group


def _inseparable(layout: RankLayout, dtype: str, glued: Container[str]) -> list[tuple[list[str], int]]:
    """Return the storages of a dtype in groups that share a bucket, as (names, total bytes)."""
    found: list[tuple[list[str], int]] = []
    for name, storage in layout.storages.items():
        if storage.dtype == dtype:
            names, nbytes = found.pop() if name in glued and found else ([], 0)
            found.append(([*names, name], nbytes + storage.nbytes))
    return found


def _bucket(layout: RankLayout, names: list[str], pieces: dict[str, list[Piece]]) -> Bucket:
    moved, offset = [], 0
    for name in names:
        moved += [Piece(p.tensor, p.box, STORAGE, offset + p.offset, p.strides) for p in pieces[name]]
        offset += layout.storages[name].size
    held = [layout.storages[name] for name in names]
    flat = Storage((offset,), held[0].dtype)
    return Bucket(
        names=tuple(names),
        dtypes=tuple(s.dtype for s in held),
        shapes=tuple(s.shape for s in held),
        nbytes=flat.nbytes,
        layout=RankLayout(layout.rank, {STORAGE: flat}, tuple(moved)),
    )
