"""The record that flows from the engines to the trainer, and its wire form.

One `Trajectory` is what one policy said in one episode: prompt and response tokens with, for each token, who sampled it. The
arrays are written once, by the forward pass that sampled the token, and never changed afterwards.

Wire form: a msgpack header (names, dtypes, shapes, digests) followed by one raw little-endian frame for each array, one of the
encoded routes and one of the encoded masks, empty where there are none. Decoding checks every length against the header and
against `Limits` before it allocates anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from asyncmoe.errors import ProtocolError
from asyncmoe.record import EncodedMasks, Routes
from asyncmoe.record.checksum import crc32c
from asyncmoe.record.masks import check_masks
from asyncmoe.record.routes import check_routes

Buffer = bytes | bytearray | memoryview
NOT_SAMPLED = -1
"""Value of `versions` where the token was given (prompt, observation), not sampled."""

ARRAYS = {"tokens": "<i4", "loss_mask": "|b1", "logprobs": "<f4", "versions": "<i4"}
"""The arrays over T tokens, and their dtypes."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Prompt and response of one policy in one episode; T tokens in all.

    Attributes:
        key: unique name within a run, e.g. "g12.e3.a0.t0" (group, episode, agent, attempt).
        group: episodes of the same prompt share it; advantages are computed over it.
        tokens: int32[T].
        loss_mask: bool[T]; True where this policy sampled the token. False for prompt and observation tokens.
        logprobs: float32[T]; behaviour log-probability in nats, after temperature; 0 where `loss_mask` is False.
        versions: int32[T]; weight version that sampled the token, `NOT_SAMPLED` where `loss_mask` is False.
        reward: scalar reward of the episode.
        finish: why generation ended: "stop" or "length".
        prefix_version: the version all keys and values of the prompt are known to come from, or `NOT_SAMPLED` when a prefix
            cached under another version may have been used.
        seconds: durations of the stages this record went through, by name.
        routes: the experts of the first T - 1 tokens (the last one has not been through the model), where they were recorded.
        masks: the ids each of the T tokens was sampled from, where they were recorded.
    """

    key: str
    group: int
    episode: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    finish: str
    prefix_version: int = NOT_SAMPLED
    agent: int = 0
    attempt: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    routes: Routes | None = None
    masks: EncodedMasks | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token; what the consumption rule looks at. `NOT_SAMPLED` for a demonstration."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return int(sampled.min()) if len(sampled) else NOT_SAMPLED

    @property
    def is_pure(self) -> bool:
        """True when every key, value and token is known to come from one weight version."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return len(sampled) > 0 and bool((sampled == self.prefix_version).all())


@dataclass(frozen=True)
class Limits:
    """Upper bounds a decoder enforces before it allocates."""

    max_tokens: int = 1 << 20
    max_header_bytes: int = 64 << 10


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


def encode(trajectory: Trajectory) -> list[Buffer]:
    """Header frame, one frame for each array in the order of the header, then routes and masks. Contiguous arrays are not copied.

    Raises:
        ProtocolError: an array of another dtype or length than `Trajectory` says, or routes or masks of another number of tokens,
            which no decoder would take.
    """
    arrays = {n: np.ascontiguousarray(getattr(trajectory, n)) for n in ARRAYS}
    for n, a in arrays.items():
        if a.dtype != ARRAYS[n] or a.shape != (len(trajectory),) or not len(a):
            raise ProtocolError(
                f"trajectory {trajectory.key} {n}: got {a.dtype}{a.shape}, expected {ARRAYS[n]}({len(trajectory)},), not empty"
            )
    r, m = trajectory.routes, trajectory.masks
    for name, part, rows in (("routes", r, len(trajectory) - 1), ("masks", m, len(trajectory))):
        if part is not None and part.rows != rows:
            raise ProtocolError(f"trajectory {trajectory.key} {name}: got {part.rows} rows, expected {rows}")
    digest = 0
    for a in arrays.values():
        digest = crc32c(a.data.cast("B"), digest)
    header = _Header(
        key=trajectory.key,
        group=trajectory.group,
        episode=trajectory.episode,
        agent=trajectory.agent,
        attempt=trajectory.attempt,
        reward=float(trajectory.reward),
        finish=trajectory.finish,
        prefix_version=trajectory.prefix_version,
        seconds=trajectory.seconds,
        arrays=tuple(_ArraySpec(n, ARRAYS[n], a.shape) for n, a in arrays.items()),
        digest=digest,
        routes=None if r is None else _RoutesSpec(r.rows, r.layers, r.top_k, r.experts, r.digests),
        masks=None if m is None else _MasksSpec(m.rows, m.ids, m.vocabulary, m.digest),
    )
    record: tuple[Buffer, Buffer] = (b"" if r is None else r.planes, b"" if m is None else m.data)
    return [msgspec.msgpack.encode(header), *(a.data.cast("B") for a in arrays.values()), *record]


def part(frames: Sequence[Buffer], layers: Sequence[int] | None = None, masks: bool = True) -> list[Buffer]:
    """The frames of a trajectory (`encode`) with only a part of what was recorded; consecutive layers are not copied.

    Args:
        frames: as `encode` made them, not from elsewhere.
        layers: numbers of the layers whose routes are left, ascending; None: all. A trajectory without routes stays one.
        masks: whether masks are left.

    Raises:
        ProtocolError: it has routes, but not of one of `layers`.
    """
    if layers is None and masks:
        return list(frames)
    head, *arrays, routes_frame, masks_frame = frames
    header = msgspec.msgpack.decode(head, type=_Header)
    spec = header.routes
    if layers is not None and spec is not None:
        routes_frame, spec = _layers_of(header, spec, memoryview(routes_frame).cast("B"), layers)
    header = msgspec.structs.replace(header, routes=spec, masks=header.masks if masks else None)
    return [msgspec.msgpack.encode(header), *arrays, routes_frame, masks_frame if masks else b""]


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
    """Number of frames `encode` makes for that many trajectories."""
    return trajectory_count * (1 + len(ARRAYS) + 2)


def decode(frames: Sequence[Buffer], limits: Limits | None = None) -> Trajectory:
    """The inverse of `encode`; arrays are read-only views of the frames.

    Raises:
        ProtocolError: a frame count, length, dtype, shape or digest that disagrees with the header or exceeds `limits`.
    """
    limits = limits or Limits()
    if len(frames) != frames_in(1):
        raise ProtocolError(f"trajectory: got {len(frames)} frames, expected {frames_in(1)}")
    head, *views, routes_frame, masks_frame = (memoryview(frame).cast("B") for frame in frames)
    if len(head) > limits.max_header_bytes:
        raise ProtocolError(f"trajectory header: got {len(head)} bytes, expected at most {limits.max_header_bytes}")
    try:
        header = msgspec.msgpack.decode(head, type=_Header)
    # Besides its own error msgspec lets invalid UTF-8 (ValueError) and deep nesting (RecursionError) escape.
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"trajectory header: {error}") from error
    specs = [(s.name, s.dtype) for s in header.arrays]
    if specs != list(ARRAYS.items()):
        raise ProtocolError(f"trajectory {header.key}: got arrays {specs}, expected {list(ARRAYS.items())}")
    if len({s.shape for s in header.arrays}) != 1:
        raise ProtocolError(f"trajectory {header.key}: got shapes {[s.shape for s in header.arrays]}, expected one length")
    arrays, digest = {}, 0
    for spec, frame in zip(header.arrays, views, strict=True):
        arrays[spec.name] = _read(header.key, spec, frame, limits)
        digest = crc32c(frame, digest)
    if digest != header.digest:
        raise ProtocolError(f"trajectory {header.key}: got digest {digest:08x}, expected {header.digest:08x}")
    h = header
    return Trajectory(
        h.key,
        h.group,
        h.episode,
        reward=h.reward,
        finish=h.finish,
        prefix_version=h.prefix_version,
        agent=h.agent,
        attempt=h.attempt,
        seconds=h.seconds,
        routes=_read_routes(h, routes_frame),
        masks=_read_masks(h, masks_frame),
        **arrays,
    )


def _read(key: str, spec: _ArraySpec, frame: memoryview, limits: Limits) -> np.ndarray:
    if len(spec.shape) != 1 or not 1 <= spec.shape[0] <= limits.max_tokens:
        raise ProtocolError(f"trajectory {key} {spec.name}: got shape {spec.shape}, expected [T] with 1 <= T <= {limits.max_tokens}")
    expected = spec.shape[0] * np.dtype(spec.dtype).itemsize
    if len(frame) != expected:
        raise ProtocolError(f"trajectory {key} {spec.name}: got {len(frame)} bytes, expected {expected}")
    # A bool array whose bytes are not 0 or 1 behaves differently from one numpy operation to the next.
    if spec.dtype == "|b1" and np.frombuffer(frame, dtype=np.uint8).max() > 1:
        raise ProtocolError(f"trajectory {key} {spec.name}: got bytes that are no truth values, expected 0 or 1")
    return np.frombuffer(frame.toreadonly(), dtype=spec.dtype)


def _read_routes(header: _Header, frame: memoryview) -> Routes | None:
    spec, expected = header.routes, header.arrays[0].shape[0] - 1
    if spec is None:
        _expect_empty(header, "routes", frame)
        return None
    if spec.rows != expected:
        raise ProtocolError(f"trajectory {header.key}: got routes of {spec.rows} tokens, expected {expected}")
    routes = Routes(spec.rows, spec.layers, spec.top_k, spec.experts, spec.digests, frame.toreadonly())
    check_routes(routes, header.key)
    return routes


def _read_masks(header: _Header, frame: memoryview) -> EncodedMasks | None:
    spec, expected = header.masks, header.arrays[0].shape[0]
    if spec is None:
        _expect_empty(header, "masks", frame)
        return None
    if spec.rows != expected:
        raise ProtocolError(f"trajectory {header.key}: got masks of {spec.rows} tokens, expected {expected}")
    masks = EncodedMasks(spec.rows, spec.ids, spec.vocabulary, spec.digest, frame.toreadonly())
    check_masks(masks, header.key)
    return masks


def _expect_empty(header: _Header, name: str, frame: memoryview) -> None:
    if frame.nbytes:
        raise ProtocolError(f"trajectory {header.key}: got {frame.nbytes} bytes of {name}, expected none")
