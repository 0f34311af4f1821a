"""Routes: packing round trips for any requested layers, in the documented number of bits; damage is always detected."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_trajectory import distinct

from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.trajectory import Routes, Routing, decode_routes, encode_routes
from asyncmoe.trajectory.native import crc32c
from tests.unit.example_counts import examples


@st.composite
def cases(draw: st.DrawFn) -> tuple[Routing, np.ndarray]:
    experts = draw(st.one_of(st.integers(1, 600), st.integers(1, 1 << 16), st.sampled_from([2**b for b in range(17)])))
    top_k = draw(st.integers(1, min(experts, 17)))
    all_layers = draw(st.integers(1, 5))
    layers = tuple(sorted(draw(st.sets(st.integers(0, all_layers - 1), min_size=1))))
    rows = draw(st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 128, 200])))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Routing(all_layers, layers, top_k, experts), distinct(random, rows, all_layers, top_k, experts)


def by_bits(routes: np.ndarray, bits: int) -> bytes:
    """The format as it is defined, bit by bit."""
    stream = (routes.reshape(-1, 1) >> np.arange(bits)) & 1
    return np.packbits(stream.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


@settings(deadline=None, max_examples=examples(200))
@given(cases())
def test_round_trip_and_format(case: tuple[Routing, np.ndarray]) -> None:
    routing, routes = case
    made = encode_routes(routes, routing, "t")
    assert made.bits == max(1, int(np.ceil(np.log2(routing.experts))))
    assert bytes(made.planes) == b"".join(by_bits(routes[:, layer], made.bits) for layer in routing.layers)
    back = decode_routes(made, "t")
    assert back.dtype == (np.uint8 if routing.experts <= 256 else np.uint16)
    np.testing.assert_array_equal(back, routes[:, list(routing.layers)].transpose(1, 0, 2))


def test_rows_that_are_not_contiguous() -> None:
    wide = np.arange(4 * 6 * 4, dtype=np.int32).reshape(4, 6, 4)
    routing = Routing(3, (0, 2), 4, 96)
    np.testing.assert_array_equal(decode_routes(encode_routes(wide[:, ::2], routing, "t"), "t"), wide[:, [0, 4]].transpose(1, 0, 2))


@settings(deadline=None)
@given(cases(), st.data())
def test_an_id_that_is_no_experts_is_named(case: tuple[Routing, np.ndarray], data: st.DataObject) -> None:
    routing, routes = case
    if not len(routes):
        return
    token = data.draw(st.integers(0, len(routes) - 1))
    layer = data.draw(st.sampled_from(routing.layers))
    choice = data.draw(st.integers(0, routing.top_k - 1))
    wrong = data.draw(st.one_of(st.integers(routing.experts, 2**31 - 1), st.integers(-(2**31), -1)))
    routes[token, layer, choice] = wrong
    said = f"^routes_out_of_range: g1: token {token}, layer {layer}, choice {choice}: got expert {wrong} "
    with pytest.raises(TrajectoryRejected, match=said):
        encode_routes(routes, routing, "g1")


@settings(deadline=None, max_examples=examples(200))
@given(cases(), st.data())
def test_an_expert_a_token_has_twice_is_named(case: tuple[Routing, np.ndarray], data: st.DataObject) -> None:
    routing, routes = case
    if not len(routes) or routing.top_k == 1:
        return
    token = data.draw(st.integers(0, len(routes) - 1))
    layer = data.draw(st.sampled_from(routing.layers))
    choice = data.draw(st.integers(1, routing.top_k - 1))
    expert = routes[token, layer, data.draw(st.integers(0, choice - 1))]
    place = f"token {token}, layer {layer}, choice {choice}: got expert {expert} a second time"
    # As if the engine had sent it, and as if it had been damaged and sealed again.
    packed = encode_routes(routes, routing, "g1")
    routes[token, layer, choice] = expert
    with pytest.raises(TrajectoryRejected, match=f"^routes_repeated: g1: {place}"):
        encode_routes(routes, routing, "g1")
    planes = b"".join(by_bits(routes[:, i], packed.bits) for i in routing.layers)
    with pytest.raises(ProtocolError, match=f"routes of g1: {place}"):
        decode_routes(sealed(dataclasses.replace(packed, planes=planes)), "g1")


def test_what_is_in_layers_without_experts_does_not_matter() -> None:
    routes = np.full((3, 2, 2), -7, np.int32)
    routes[:, 1] = (4, 2)
    assert (decode_routes(encode_routes(routes, Routing(2, (1,), 2, 5), "t"), "t") == (4, 2)).all()


@pytest.mark.parametrize(
    "routes", [np.zeros((3, 4, 2), np.int32), np.zeros((3, 3, 1), np.int32), np.zeros((3, 6), np.int32), np.zeros((3, 3, 2))]
)
def test_other_layers_are_refused(routes: np.ndarray) -> None:
    with pytest.raises(TrajectoryRejected, match=r"^routes_wrong_layers: g1: .*expected int32\[rows, 3, 2\]"):
        encode_routes(routes, Routing(3, (1, 2), 2, 8), "g1")


@settings(deadline=None)
@given(cases(), st.data())
def test_any_damage_is_refused(case: tuple[Routing, np.ndarray], data: st.DataObject) -> None:
    routing, routes = case
    made = encode_routes(routes, routing, "t")
    planes = bytearray(made.planes)
    kind = data.draw(st.sampled_from(["byte", "shorter", "longer", "rows", "experts", "top_k", "layers", "digests"]))
    changes: dict[str, object] = {}
    if kind == "byte" and planes:
        planes[data.draw(st.integers(0, len(planes) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "shorter" and planes:
        del planes[-data.draw(st.integers(1, len(planes))) :]
    elif kind == "layers":
        changes["layers"] = tuple(n + 1 for n in made.layers)
    elif kind == "digests":
        changes["digests"] = made.digests[:-1]
    elif kind in ("rows", "experts", "top_k"):
        changes[kind] = getattr(made, kind) + data.draw(st.sampled_from([-1, 1, 2**40]))
    else:
        planes += b"\0"
    with pytest.raises(ProtocolError, match="routes of g1"):
        decode_routes(dataclasses.replace(made, planes=bytes(planes), **changes), "g1")


def sealed(routes: Routes) -> Routes:
    """With the right digests, computed one by one."""
    size, planes = routes.plane_bytes, bytes(routes.planes)
    numbers = ((routes.rows, layer, routes.top_k, routes.experts) for layer in routes.layers)
    digests = (crc32c(planes[i * size : (i + 1) * size], crc32c(struct.pack("<4Q", *one))) for i, one in enumerate(numbers))
    return dataclasses.replace(routes, digests=tuple(digests))


@pytest.mark.parametrize("rows", [0, 1, 37, 3000])
def test_the_digest_of_a_layer_covers_its_dimensions_and_its_plane(rows: int) -> None:
    made = encode_routes(distinct(np.random.default_rng(rows), rows, 4, 3, 200), Routing(4, (1, 3), 3, 200), "t")
    assert made.digests == sealed(made).digests


def test_what_is_wrong_although_the_digest_is_right_is_refused() -> None:
    ids = np.broadcast_to(np.arange(3, dtype=np.int32), (9, 2, 3)).copy()
    ids[7, 1, 2] = 6
    outside = dataclasses.replace(encode_routes(ids, Routing(2, (0, 1), 3, 7), "t"), experts=6)
    bits = dataclasses.replace(encode_routes(np.zeros((3, 1, 1), np.int32), Routing(1, (0,), 1, 8), "t"), planes=b"\0\2")
    wide = Routes(1, (0,), 257, 1 << 16, (0,), bytes(2 * 257))
    for routes, words in ((outside, "token 7, layer 1, choice 2: got expert 6"), (bits, "zeros"), (wide, "top 257")):
        with pytest.raises(ProtocolError, match=words):
            decode_routes(sealed(routes), "g1")
