"""The pieces of a trajectory in a store: what comes out is what `part` sends, or an error that names what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import DataError
from asyncmoe.payloads import packed
from asyncmoe.payloads.packed import HEAD, Asked
from asyncmoe.trajectory import Buffer, Masks, Routing, Trajectory, encode, encode_masks, encode_routes, part
from tests.unit.test_queue_model import make_group

ROUTING = Routing(all_layers=5, layers=(0, 1, 3, 4), top_k=2, experts=8)
STORED, KEY = "asyncmoe:r:payload:1.w.0", "g0.e0"


def trajectory(tokens: int, seed: int, routed: bool, masked: bool) -> Trajectory:
    random = np.random.default_rng(seed)
    plain = make_group(0, 1, [0, 0])[0]
    first = random.integers(0, 8, (tokens - 1, 5, 1))
    routes = ((first + np.arange(2)) % 8).astype(np.int32)
    rows = [np.sort(random.choice(60, 3, replace=False)) for _ in range(tokens)]
    sampled = Masks(np.arange(0, 3 * tokens + 1, 3).astype(np.int32), np.concatenate(rows).astype(np.int32), 60)
    return replace(
        plain,
        tokens=random.integers(0, 60, tokens).astype(np.int32),
        loss_mask=np.arange(tokens) > 0,
        logprobs=-random.random(tokens).astype(np.float32),
        versions=np.zeros(tokens, np.int32),
        routes=encode_routes(routes, ROUTING, KEY) if routed else None,
        masks=encode_masks(sampled, KEY) if masked else None,
    )


cases = st.builds(trajectory, st.integers(2, 40), st.integers(0, 9), st.booleans(), st.booleans())
layers = st.none() | st.sets(st.sampled_from(ROUTING.layers)).map(lambda found: tuple(sorted(found)))


def read(asked: Asked, pieces: dict[str, Buffer]) -> list[Buffer]:
    head = packed.opened(asked, pieces[HEAD])
    return packed.unpacked(asked, head, {name: pieces.get(name) for name in packed.wanted(asked, head)})


@settings(max_examples=25, deadline=None)
@given(one=cases, kept=layers, masks=st.booleans())
def test_a_part_comes_out_as_the_queue_would_send_it(one: Trajectory, kept: tuple[int, ...] | None, masks: bool) -> None:
    frames = encode(one)
    pieces = packed.packed(STORED, KEY, frames)
    assert [bytes(frame) for frame in read(Asked(STORED, KEY, kept, masks), pieces)] == [
        bytes(frame) for frame in part(frames, kept, masks)
    ]


@settings(max_examples=25, deadline=None)
@given(one=cases, data=st.data())
def test_whatever_is_damaged_truncated_or_gone_is_named(one: Trajectory, data: st.DataObject) -> None:
    pieces = {name: bytearray(memoryview(piece).cast("B")) for name, piece in packed.packed(STORED, KEY, encode(one)).items()}
    name = data.draw(st.sampled_from(sorted(pieces)))
    at = data.draw(st.integers(0, len(pieces[name]) - 1))
    damage = data.draw(st.sampled_from(["flip", "cut", "gone"]))
    if damage == "flip":
        pieces[name][at] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        del pieces[name][at:]
    else:
        pieces[name] = bytearray()
    with pytest.raises(DataError, match=f"payload {STORED} {KEY}"):
        read(Asked(STORED, KEY), pieces)


@pytest.mark.parametrize("asked", [Asked("asyncmoe:r:payload:1.w.1", KEY), Asked(STORED, "g0.e1"), Asked(STORED, f"{KEY} ")])
def test_another_group_s_or_trajectory_s_pieces_do_not_pass(asked: Asked) -> None:
    pieces = packed.packed(STORED, KEY, encode(trajectory(9, 0, True, True)))
    with pytest.raises(DataError, match="got a wrong checksum"):
        read(asked, pieces)


def test_a_layer_that_was_not_recorded_is_named() -> None:
    pieces = packed.packed(STORED, KEY, encode(trajectory(9, 0, True, True)))
    with pytest.raises(DataError, match=r"got no routes of layer 2, expected a layer of \(0, 1, 3, 4\)"):
        read(Asked(STORED, KEY, (1, 2)), pieces)
