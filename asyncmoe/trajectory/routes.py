"""Routes: the experts that processed each token, bit-packed layer by layer.

The format is layer-major, because a pipeline stage needs its own layers for all tokens: these are consecutive bytes, so a stage fetches and
unpacks nothing else, and gets the [rows, top_k] array that each layer's router needs. Layers without experts take no space.
The order of a token's experts is kept, because their combination weights follow it. No token has the same expert twice in a layer: a
trainer that replayed such a route would use fewer experts than the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.trajectory import _C
from asyncmoe.trajectory.native import Buffer

MAX_EXPERTS = 1 << 16
MAX_TOP_K = 256
MAX_LAYERS = 1 << 12


@dataclass(frozen=True)
class Routing:
    """The dimensions of a model's routing.

    Attributes:
        all_layers: number of the model's layers, with or without experts; SGLang reports all of them.
        layers: numbers of the layers with experts, ascending.
        top_k: experts per token in each of these layers.
        experts: experts per layer; ids are 0 to experts - 1.
    """

    all_layers: int
    layers: tuple[int, ...]
    top_k: int
    experts: int


@dataclass(frozen=True)
class Routes:
    """Encoded routes of `rows` tokens.

    Attributes:
        rows: number of tokens.
        layers: numbers of the included layers of the model, ascending.
        top_k: experts per token in each layer.
        experts: exclusive upper bound of the expert ids.
        digests: for each layer, a CRC-32C of its dimensions, its number and its plane.
        planes: the planes of all layers, concatenated, `plane_bytes` each; csrc/trajectory/routes.h defines the format.
    """

    rows: int
    layers: tuple[int, ...]
    top_k: int
    experts: int
    digests: tuple[int, ...]
    planes: Buffer

    @property
    def bits(self) -> int:
        """Bits per expert id."""
        return max(1, (self.experts - 1).bit_length())

    @cached_property
    def plane_bytes(self) -> int:
        return -(-self.rows * self.top_k * self.bits // 8)

    def part(self, first: int, last: int) -> Routes:
        """Return a view of the layers at positions `first` to `last` (exclusive) of `layers`."""
        planes = memoryview(self.planes)[first * self.plane_bytes : last * self.plane_bytes]
        return replace(self, layers=self.layers[first:last], digests=self.digests[first:last], planes=planes)


def encode_routes(routes: np.ndarray, routing: Routing, key: str) -> Routes:
    """Pack the routes that an engine reported.

    Args:
        routes: int32[rows, all_layers, top_k]; values of layers without experts are ignored.
        key: the trajectory's key, for errors.

    Raises:
        TrajectoryRejected: "routes_wrong_layers": wrong dtype or number of layers or experts per token; "routes_out_of_range": an
            invalid expert id; "routes_repeated": a token has an expert twice in a layer.
    """
    expected = (routing.all_layers, routing.top_k)
    if routes.dtype != np.int32 or routes.ndim != 3 or routes.shape[1:] != expected:
        detail = f"{key}: got routes {routes.dtype}{list(routes.shape)}, expected int32[rows, {expected[0]}, {expected[1]}]"
        raise TrajectoryRejected("routes_wrong_layers", detail)
    routes = np.ascontiguousarray(routes)
    planes, bad = _C.pack_routes(routes, np.array(routing.layers, np.int64), routing.experts)
    if bad >= 0:
        token, layer, choice = np.unravel_index(bad, routes.shape)
        expert = int(routes.flat[bad])
        detail = f"{key}: token {token}, layer {layer}, choice {choice}: got expert {expert}"
        if 0 <= expert < routing.experts:
            raise TrajectoryRejected("routes_repeated", f"{detail} a second time")
        raise TrajectoryRejected("routes_out_of_range", f"{detail} of {routing.experts}, expected 0 to {routing.experts - 1}")
    made = Routes(len(routes), routing.layers, routing.top_k, routing.experts, (), memoryview(planes.data).toreadonly())
    return sealed(made)


def sealed(routes: Routes) -> Routes:
    """Return routes with the digests of their planes."""
    return replace(routes, digests=tuple(_digests(routes)))


def decode_routes(routes: Routes, key: str, *, checked: bool = False) -> np.ndarray:
    """Unpack all layers of `routes`; use `Routes.part` to unpack only some.

    Args:
        checked: `check_routes` has passed already, as in a trajectory that `asyncmoe.trajectory.decode` made.

    Returns:
        uint8[layers, rows, top_k] for up to 256 experts, uint16 for more.

    Raises:
        ProtocolError: as `check_routes`; or a token has an invalid expert id, or the same expert twice in a layer (names token and layer).
    """
    if not checked:
        check_routes(routes, key)
    planes = np.frombuffer(routes.planes, np.uint8)
    ids, bad = _C.unpack_routes(planes, routes.rows, routes.top_k, routes.experts, len(routes.layers))
    if bad == ids.size:
        raise ProtocolError(f"routes of {key}: got bits after the last expert of a layer, expected zeros")
    if bad >= 0:
        layer, token, choice = np.unravel_index(bad, ids.shape)
        place = f"token {token}, layer {routes.layers[layer]}, choice {choice}"
        expert = int(ids.flat[bad])
        what = "a second time" if expert < routes.experts else f"of {routes.experts}, expected 0 to {routes.experts - 1}"
        raise ProtocolError(f"routes of {key}: {place}: got expert {expert} {what}")
    return ids


def expect_valid(routes: Routes, key: str) -> None:
    """Check everything that `decode_routes` checks, without allocating memory for the experts. Raises as it does."""
    check_routes(routes, key)
    planes = np.frombuffer(routes.planes, np.uint8)
    if not _C.routes_valid(planes, routes.rows, routes.top_k, routes.experts, len(routes.layers)):
        decode_routes(routes, key)  # raises, and names the place


def check_routes(routes: Routes, key: str) -> None:
    """Detect corrupted routes without allocating memory.

    Raises:
        ProtocolError: dimensions are out of bounds, the planes have a wrong size, or a digest disagrees.
    """
    r = routes
    if not (0 <= r.rows < 1 << 31 and 1 <= r.experts <= MAX_EXPERTS and 1 <= r.top_k <= min(MAX_TOP_K, r.experts)):
        detail = f"got {r.rows} rows, top {r.top_k} of {r.experts} experts, expected fewer than 2^31 rows, "
        raise ProtocolError(f"routes of {key}: {detail}top 1 to {MAX_TOP_K} of at most {MAX_EXPERTS} experts")
    ascending = all(a < b for a, b in zip((-1, *r.layers), (*r.layers, MAX_LAYERS), strict=True))
    if not ascending or len(r.digests) != len(r.layers):
        detail = f"got layers {_short(r.layers)} and {len(r.digests)} digests"
        raise ProtocolError(f"routes of {key}: {detail}, expected ascending layers below {MAX_LAYERS}, and one digest for each")
    size = memoryview(r.planes).nbytes
    if size != len(r.layers) * r.plane_bytes:
        detail = f"{len(r.layers) * r.plane_bytes} bytes for {len(r.layers)} layers of {r.rows} rows"
        raise ProtocolError(f"routes of {key}: got {size} bytes, expected {detail}")
    for layer, got, expected in zip(r.layers, _digests(r), r.digests, strict=True):
        if got != expected:
            raise ProtocolError(f"routes of {key}: layer {layer}: got digest {got:08x}, expected {expected & 0xFFFFFFFF:08x}")


def _digests(routes: Routes) -> Sequence[int]:
    """Return the digest of each plane. It also covers layer number and dimensions, so that no layer can pass for another."""
    planes, layers = np.frombuffer(routes.planes, np.uint8), np.array(routes.layers, np.int64)
    digests: Sequence[int] = _C.digest_routes(planes, routes.rows, routes.top_k, routes.experts, layers).tolist()
    return digests


def _short(numbers: tuple[int, ...]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"{numbers[:4]} ... {numbers[-2:]}"
