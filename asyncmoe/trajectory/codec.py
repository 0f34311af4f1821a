"""The wire format of a trajectory.

A msgpack header (names, dtypes, shapes, digests), then one raw little-endian frame per array, one for `top`, one for the encoded routes and
one for the encoded masks; the frame of an absent part is empty. Decoding checks every length against the header and against upper bounds
before it allocates memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncmoe.errors import ProtocolError
from asyncmoe.trajectory.masks import EncodedMasks, check_masks
from asyncmoe.trajectory.native import Buffer, crc32c
from asyncmoe.trajectory.routes import Routes, check_routes
from asyncmoe.trajectory.trajectory import ARRAYS, OPTIONAL, TOP, Trajectory

MAX_TOKENS = 1 << 20
MAX_HEADER_BYTES = 64 << 10


class _ArraySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _RoutesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: int
    layers: tuple[int, ...]
    top_k: int
    experts: int
    digests: tuple[int, ...]


class _MasksSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: int
    ids: int
    vocabulary: int
    digest: int


class _TopSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: int
    width: int
    digest: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    group: int
    episode: int
    agent: int
    attempt: int
    reward: float
    finish: str
    prefix_version: int
    seconds: dict[str, float]
    arrays: tuple[_ArraySpec, ...]
    digest: int
    routes: _RoutesSpec | None = None
    masks: _MasksSpec | None = None
    top: _TopSpec | None = None
    branch: int = 0
    parent: int = 0
    forked: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


_PLAIN = tuple(name for name in _Header.__struct_fields__ if name not in ("arrays", "digest", "routes", "masks", "top"))
"""The fields of a trajectory that the header contains unchanged."""


def encode(trajectory: Trajectory) -> list[Buffer]:
    """Encode as a header frame, one frame per array of `ARRAYS` and `OPTIONAL`, then `top`, routes and masks. Copies no contiguous array.

    Args:
        trajectory: one that `asyncmoe.trajectory.validate` accepts.
    """
    dtypes = ARRAYS | {n: dtype for n, dtype in OPTIONAL.items() if getattr(trajectory, n) is not None}
    arrays = {n: np.ascontiguousarray(getattr(trajectory, n)) for n in dtypes}
    r, m, t = trajectory.routes, trajectory.masks, trajectory.top
    data: Buffer = b"" if t is None else np.ascontiguousarray(t).reshape(-1).view(np.uint8).data
    top = None if t is None else _TopSpec(t.shape[0], t.shape[1], crc32c(data))
    digest = 0
    for a in arrays.values():
        digest = crc32c(a.data.cast("B"), digest)
    plain: dict[str, Any] = {name: getattr(trajectory, name) for name in _PLAIN}
    header = _Header(
        **plain | {"reward": float(trajectory.reward)},
        arrays=tuple(_ArraySpec(n, dtypes[n], a.shape) for n, a in arrays.items()),
        digest=digest,
        routes=None if r is None else _RoutesSpec(r.rows, r.layers, r.top_k, r.experts, r.digests),
        masks=None if m is None else _MasksSpec(m.rows, m.ids, m.vocabulary, m.digest),
        top=top,
    )
    record: tuple[Buffer, ...] = (data, b"" if r is None else r.planes, b"" if m is None else m.data)
    every: list[Buffer] = [arrays[n].data.cast("B") if n in arrays else b"" for n in (*ARRAYS, *OPTIONAL)]
    return [msgspec.msgpack.encode(header), *every, *record]


def part(frames: Sequence[Buffer], layers: Sequence[int] | None = None, masks: bool = True) -> list[Buffer]:
    """Keep only a part of what was recorded in a trajectory's frames (`encode`). Does not copy consecutive layers.

    Args:
        frames: the result of `encode`; must be trusted.
        layers: numbers of the layers whose routes are kept, ascending; None: all. No effect on a trajectory without routes.
        masks: whether masks and `top` are kept.

    Raises:
        ProtocolError: the trajectory has routes, but not of every layer in `layers`.
    """
    if layers is None and masks:
        return list(frames)
    head, *arrays, top_frame, routes_frame, masks_frame = frames
    header = msgspec.msgpack.decode(head, type=_Header)
    spec = header.routes
    if layers is not None and spec is not None:
        routes_frame, spec = _layers_of(header, spec, memoryview(routes_frame).cast("B"), layers)
    header = msgspec.structs.replace(header, routes=spec, masks=header.masks if masks else None, top=header.top if masks else None)
    last = (top_frame, routes_frame, masks_frame) if masks else (b"", routes_frame, b"")
    return [msgspec.msgpack.encode(header), *arrays, *last]


def _layers_of(header: _Header, spec: _RoutesSpec, planes: memoryview, layers: Sequence[int]) -> tuple[Buffer, _RoutesSpec]:
    place = {layer: i for i, layer in enumerate(spec.layers)}
    missing = [layer for layer in layers if layer not in place]
    if missing or list(layers) != sorted(set(layers)):
        raise ProtocolError(f"trajectory {header.key}: got layers {tuple(layers)} to send, expected some of {spec.layers}, ascending")
    size = len(planes) // max(len(spec.layers), 1)
    places = [place[layer] for layer in layers]
    first, last = (places[0], places[-1] + 1) if places else (0, 0)
    consecutive = last - first == len(places)
    chosen = planes[first * size : last * size] if consecutive else b"".join(planes[i * size : (i + 1) * size] for i in places)
    return chosen, msgspec.structs.replace(spec, layers=tuple(layers), digests=tuple(spec.digests[i] for i in places))


def frames_in(trajectory_count: int) -> int:
    """Return the number of frames that `encode` makes for `trajectory_count` trajectories."""
    return trajectory_count * (1 + len(ARRAYS) + len(OPTIONAL) + 3)


def decode(frames: Sequence[Buffer]) -> Trajectory:
    """Invert `encode`; arrays are read-only views of the frames.

    Raises:
        ProtocolError: a frame count, length, dtype, shape or digest disagrees with the header, or exceeds its bound.
    """
    if len(frames) != frames_in(1):
        raise ProtocolError(f"trajectory: got {len(frames)} frames, expected {frames_in(1)}")
    head, *views, top_frame, routes_frame, masks_frame = (memoryview(frame).cast("B") for frame in frames)
    if len(head) > MAX_HEADER_BYTES:
        raise ProtocolError(f"trajectory header: got {len(head)} bytes, expected at most {MAX_HEADER_BYTES}")
    try:
        header = msgspec.msgpack.decode(head, type=_Header)
    # In addition to its own error, msgspec raises ValueError for invalid UTF-8 and RecursionError for deep nesting.
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"trajectory header: {error}") from error
    known: dict[str, Any] = {name: getattr(header, name) for name in _PLAIN} | _read_arrays(header, views)
    top = _read_top(header, int(known["loss_mask"].sum()), top_frame)
    return Trajectory(**known, routes=_read_routes(header, routes_frame), masks=_read_masks(header, masks_frame), top=top)


def _read_arrays(header: _Header, frames: Sequence[memoryview]) -> dict[str, np.ndarray]:
    specs = {s.name: s for s in header.arrays}
    expected = ARRAYS | {n: dtype for n, dtype in OPTIONAL.items() if n in specs}
    got = [(s.name, s.dtype) for s in header.arrays]
    if got != list(expected.items()):
        raise ProtocolError(f"trajectory {header.key}: got arrays {got}, expected {list(expected.items())}")
    if len({s.shape for s in header.arrays}) != 1:
        raise ProtocolError(f"trajectory {header.key}: got shapes {[s.shape for s in header.arrays]}, expected equal ones")
    arrays, digest = {}, 0
    for name, frame in zip((*ARRAYS, *OPTIONAL), frames, strict=True):
        if name not in specs:
            _expect_empty(header, name, frame)
            continue
        arrays[name] = _read(header.key, specs[name], frame)
        digest = crc32c(frame, digest)
    if digest != header.digest:
        raise ProtocolError(f"trajectory {header.key}: got digest {digest:08x}, expected {header.digest:08x}")
    return arrays


def _read(key: str, spec: _ArraySpec, frame: memoryview) -> np.ndarray:
    if len(spec.shape) != 1 or not 1 <= spec.shape[0] <= MAX_TOKENS:
        raise ProtocolError(f"trajectory {key} {spec.name}: got shape {spec.shape}, expected [T] with 1 <= T <= {MAX_TOKENS}")
    expected = spec.shape[0] * np.dtype(spec.dtype).itemsize
    if len(frame) != expected:
        raise ProtocolError(f"trajectory {key} {spec.name}: got {len(frame)} bytes, expected {expected}")
    # NumPy operations treat a bool array with bytes other than 0 and 1 inconsistently.
    if spec.dtype == "|b1" and np.frombuffer(frame, dtype=np.uint8).max() > 1:
        raise ProtocolError(f"trajectory {key} {spec.name}: got invalid bool bytes, expected 0 or 1")
    return np.frombuffer(frame.toreadonly(), dtype=spec.dtype)


def _read_routes(header: _Header, frame: memoryview) -> Routes | None:
    spec, expected = header.routes, header.arrays[0].shape[0] - 1
    if spec is None:
        _expect_empty(header, "routes", frame)
        return None
    if spec.rows != expected:
        raise ProtocolError(f"trajectory {header.key}: got routes of {spec.rows} tokens, expected {expected}")
    routes = Routes(**msgspec.structs.asdict(spec), planes=frame.toreadonly())
    check_routes(routes, header.key)
    return routes


def _read_masks(header: _Header, frame: memoryview) -> EncodedMasks | None:
    spec, expected = header.masks, header.arrays[0].shape[0]
    if spec is None:
        _expect_empty(header, "masks", frame)
        return None
    if spec.rows != expected:
        raise ProtocolError(f"trajectory {header.key}: got masks of {spec.rows} tokens, expected {expected}")
    masks = EncodedMasks(**msgspec.structs.asdict(spec), data=frame.toreadonly())
    check_masks(masks, header.key)
    return masks


def _read_top(header: _Header, sampled: int, frame: memoryview) -> np.ndarray | None:
    spec = header.top
    if spec is None:
        _expect_empty(header, "top", frame)
        return None
    if spec.rows != sampled or not 0 < len(frame) == spec.rows * spec.width * TOP.itemsize or crc32c(frame) != spec.digest:
        raise ProtocolError(f"trajectory {header.key}: got top of {spec.rows} tokens in {len(frame)} bytes, expected {sampled} of {spec}")
    return np.frombuffer(frame.toreadonly(), TOP).reshape(spec.rows, spec.width)


def _expect_empty(header: _Header, name: str, frame: memoryview) -> None:
    if frame.nbytes:
        raise ProtocolError(f"trajectory {header.key}: got {frame.nbytes} bytes of {name}, expected none")
