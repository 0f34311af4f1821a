"""Routes of one response in transit from an engine: packed where they are recorded, joined where a trajectory is built.

Bytes, little-endian: "amr1"; rows, top_k, experts and number of layers; the layers' numbers; their digests (all uint32); the planes, as in
`Routes`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncmoe.errors import ProtocolError
from asyncmoe.trajectory.native import Buffer
from asyncmoe.trajectory.routes import MAX_LAYERS, Routes, Routing, decode_routes, encode_routes, sealed

MAGIC = b"amr1"
_HEADER = struct.Struct("<4s4I")


def to_bytes(routes: Routes) -> bytes:
    """Return the bytes that `from_bytes` reads."""
    count = len(routes.layers)
    header = _HEADER.pack(MAGIC, routes.rows, routes.top_k, routes.experts, count)
    return b"".join((header, struct.pack(f"<{2 * count}I", *routes.layers, *routes.digests), routes.planes))


def from_bytes(data: Buffer, key: str) -> Routes:
    """Read routes without copying their planes, which `decode_routes` and `check_routes` verify.

    Raises:
        ProtocolError: `data` does not begin like a result of `to_bytes`.
    """
    view = memoryview(data).cast("B")
    if len(view) < _HEADER.size:
        raise ProtocolError(f"routes of {key}: got {len(view)} bytes, expected at least {_HEADER.size}")
    magic, rows, top_k, experts, count = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(f"routes of {key}: got {bytes(view[:200])!r}, expected {MAGIC!r} at the beginning")
    begin = _HEADER.size + 8 * count
    if count > MAX_LAYERS or len(view) < begin:
        expected = f"at least {begin} bytes, and at most {MAX_LAYERS} layers"
        raise ProtocolError(f"routes of {key}: got {len(view)} bytes for {count} layers, expected {expected}")
    numbers = struct.unpack_from(f"<{2 * count}I", view, _HEADER.size)
    return Routes(rows, numbers[:count], top_k, experts, numbers[count:], view[begin:].toreadonly())


def joined(parts: Sequence[Routes], key: str) -> Routes:
    """Join the routes of consecutive tokens.

    Args:
        parts: at least one, all with the same layers, top_k and experts.

    Raises:
        ProtocolError: see `decode_routes`.
    """
    some = [part for part in parts if part.rows] or list(parts[:1])
    if len(some) == 1:
        return some[0]
    if all(part.rows * part.top_k * part.bits % 8 == 0 for part in some[:-1]):
        planes = [np.frombuffer(part.planes, np.uint8).reshape(-1, part.plane_bytes) for part in some]
        whole = memoryview(np.concatenate(planes, axis=1).reshape(-1).data).toreadonly()
        return sealed(replace(some[0], rows=sum(part.rows for part in some), planes=whole))
    return _packed(np.concatenate([decode_routes(part, key) for part in some], axis=1), some[0], key)


def first_rows(routes: Routes, rows: int, key: str) -> Routes:
    """Return the routes of the first `rows` tokens.

    Raises:
        ProtocolError: see `decode_routes`.
    """
    return _packed(decode_routes(routes, key)[:, :rows], routes, key)


def _packed(ids: np.ndarray, like: Routes, key: str) -> Routes:
    """Return ids[layers, rows, top_k] packed in the same way as `like`."""
    count = len(like.layers)
    made = encode_routes(ids.transpose(1, 0, 2).astype(np.int32), Routing(count, tuple(range(count)), like.top_k, like.experts), key)
    return sealed(replace(made, layers=like.layers))
