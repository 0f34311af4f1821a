"""Wrong arguments of the public functions of asyncmoe.reshard: each works, or raises an error of asyncmoe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe import reshard
from asyncmoe.errors import InvariantBroken, LayoutError
from asyncmoe.reshard import Box, DeltaReceiver, DeltaSender, Exchanger, LayoutBuilder, LocalTransport, Piece, RankLayout, Storage, exchange
from tests.unit.example_counts import examples

SHAPE = (4, 6)
PIECE = Piece("w", Box((0, 0), SHAPE), "s", 0, (6, 1))
LAYOUT = RankLayout(0, {"s": Storage(SHAPE, "float32")}, (PIECE,))
PLAN = reshard.plan({"w": SHAPE}, [LAYOUT], [LAYOUT])
ARRAY = np.arange(24, dtype=np.float32).reshape(SHAPE)


def built(call: str, **given: Any) -> None:
    getattr(LayoutBuilder(0, "float32"), call)(**given)


def moved(layout: RankLayout) -> None:
    got, made = np.zeros(24, np.float32), reshard.plan({"w": SHAPE}, [LAYOUT], [layout])
    exchange(made, LocalTransport(), {"s": ARRAY}, {"s": got})
    assert got.tolist() == (ARRAY.reshape(-1).tolist() if made.destinations else [0.0] * 24)


def with_field(field: str, value: Any) -> RankLayout:
    """LAYOUT with something else in a field of it, of its storage, of its piece or of its box."""
    if hasattr(LAYOUT, field):
        return replace(LAYOUT, **{field: value})
    if field in ("shape", "dtype"):
        return replace(LAYOUT, storages={"s": replace(LAYOUT.storages["s"], **{field: value})})
    changes = {"box": replace(PIECE.box, **{field: value})} if hasattr(PIECE.box, field) else {field: value}
    return replace(LAYOUT, pieces=(replace(PIECE, **changes),))


CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "place": (partial(built, "place"), {"storage": "s", "shape": SHAPE, "parts": [("w", PIECE.box, (0, 0))]}),
    "a part": (lambda **g: built("place", storage="s", shape=SHAPE, parts=[(*g.values(),)]), {"t": "w", "b": PIECE.box, "c": (0, 0)}),
    "stack": (partial(built, "stack"), {"storage": "s", "parts": [("w", PIECE.box)]}),
    "repeat": (partial(built, "repeat"), {"part": LAYOUT, "prefixes": [("a", "b")]}),
    "plan": (reshard.plan, {"tensors": {"w": SHAPE}, "source": [LAYOUT], "destination": [LAYOUT], "ranks": [0]}),
    "a tensor": (lambda shape: reshard.plan({"w": shape}, [LAYOUT], [LAYOUT]), {"shape": SHAPE}),
    "a storage": (lambda **g: Storage(**g).nbytes, {"shape": SHAPE, "dtype": "float32"}),
    "a source": (lambda layout: reshard.plan({"w": SHAPE}, [layout], [LAYOUT]), {"layout": LAYOUT}),
    "a destination": (moved, {"layout": LAYOUT}),
    "buckets": (reshard.buckets, {"layout": LAYOUT, "bucket_bytes": 64}),
    "digest": (reshard.digest, {"array": ARRAY}),
    "shard_digest": (reshard.shard_digest, {"tensors": {"w": SHAPE}, "layout": LAYOUT, "arrays": {"s": ARRAY}}),
    "exchange": (partial(exchange, PLAN, LocalTransport()), {"source_arrays": {"s": ARRAY}, "destination_arrays": {"s": ARRAY + 0}}),
    "Exchanger": (partial(Exchanger, PLAN, LocalTransport()), {"bucket_bytes": 64, "buffers": 2, "threads": 1}),
    "DeltaSender": (partial(DeltaSender, PLAN, 0), {"message_bytes": 64}),
    "DeltaReceiver": (partial(DeltaReceiver, PLAN, 0), {"message_bytes": 64, "limit_bytes": 64}),
}
numbers = st.one_of(st.integers(-3, 8), st.integers(), st.floats(), st.none(), st.text(max_size=3))
several = st.lists(numbers, max_size=5)
pairs = st.lists(st.tuples(st.text(max_size=2), numbers), max_size=2)
odd = st.sampled_from([b"12", np.zeros(24), {"s": None}, {"s": [1]}, [None], LAYOUT, [[LAYOUT]], PIECE, [PIECE]])
junk = st.one_of(numbers, several, several.map(tuple), pairs, pairs.map(dict), odd)
layouts = st.builds(with_field, st.sampled_from([one.name for kind in (RankLayout, Storage, Piece, Box) for one in fields(kind)]), junk)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=examples(600))
@given(data=st.data())
def test_a_wrong_argument(name: str, data: st.DataObject) -> None:
    call, right = CALLS[name]
    which = data.draw(st.sampled_from([*right]))
    with suppress(LayoutError, InvariantBroken):  # a plan for several ranks, on a transport of one
        call(**{**right, which: data.draw(layouts if which == "layout" else junk)})
