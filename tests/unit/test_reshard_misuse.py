"""Wrong arguments of the public functions of asyncmoe.reshard: each works, or raises an error of asyncmoe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe import reshard
from asyncmoe.errors import InvariantBroken, LayoutError
from asyncmoe.reshard import Box, DeltaDecoder, DeltaEncoder, Exchanger, LayoutBuilder, LocalTransport, Piece, RankLayout, Storage, exchange
from asyncmoe.reshard.shm_transport import ShmTransport
from tests.unit.example_counts import examples

SHAPE = (4, 6)
PIECE = Piece("w", Box((0, 0), SHAPE), "s", 0, (6, 1))
LAYOUT = RankLayout(0, {"s": Storage(SHAPE, "float32")}, (PIECE,))
PLAN = reshard.plan({"w": SHAPE}, [LAYOUT], [LAYOUT])
APART = reshard.plan({"w": SHAPE}, [LAYOUT], [LAYOUT.at(1)])
ARRAY = np.arange(24, dtype=np.float32).reshape(SHAPE)


def built(call: str, **given: Any) -> None:
    getattr(LayoutBuilder(0, "float32"), call)(**given)


def moved(layout: RankLayout) -> None:
    got, made = np.zeros(24, np.float32), reshard.plan({"w": SHAPE}, [LAYOUT], [layout])
    exchange(made, LocalTransport(), {"s": ARRAY}, {"s": got})
    assert got.tolist() == (ARRAY.reshape(-1).tolist() if made.destinations else [0.0] * 24)


def bound(source: object = ARRAY, destination: object = None) -> Exchanger:
    exchanger = Exchanger(PLAN, LocalTransport())
    exchanger.bind({"s": source}, {"s": ARRAY + 0 if destination is None else destination})
    return exchanger


def with_field(field: str, value: Any) -> RankLayout:
    """LAYOUT with something else in a field of it, of its storage, of its piece or of its box."""
    if hasattr(LAYOUT, field):
        return replace(LAYOUT, **{field: value})
    if field in ("shape", "dtype"):
        return replace(LAYOUT, storages={"s": replace(LAYOUT.storages["s"], **{field: value})})
    changes = {"box": replace(PIECE.box, **{field: value})} if hasattr(PIECE.box, field) else {field: value}
    return replace(LAYOUT, pieces=(replace(PIECE, **changes),))


COPYING = {"threads": 1, "stream": 0}
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
    "digest": (reshard.digest, {"array": ARRAY, "threads": 1}),
    "exchange": (partial(exchange, PLAN, LocalTransport()), {"source_arrays": {"s": ARRAY}, "destination_arrays": {"s": ARRAY + 0}}),
    "Exchanger": (partial(Exchanger, PLAN, LocalTransport()), {"bucket_bytes": 64, "buffers": 2, **COPYING, "timeout_s": 2.0}),
    "run": (lambda timeout_s: bound().run(timeout_s), {"timeout_s": 2.0}),
    "LocalTransport": (LocalTransport, {"rank": 0}),
    "ShmTransport": (partial(ShmTransport, session="s"), {"rank": 0}),
    "DeltaEncoder": (partial(DeltaEncoder, APART), {"rank": 0, "bucket_bytes": 64, **COPYING}),
    "DeltaDecoder": (partial(DeltaDecoder, APART), {"rank": 1, "bucket_bytes": 64, "limit_bytes": 64, **COPYING}),
}
COUNTS = (-1, True, "3", 1.5, float("nan"), 1 << 63)
NUMBERS = ("threads", "stream", "rank", "limit_bytes")
ODD = {"timeout_s": (-1, True, "3", float("nan"), float("inf"), 1e300), "buffers": (0, 1 << 40, *COUNTS), "bucket_bytes": (0, *COUNTS)}
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


@pytest.mark.parametrize(("name", "which"), [(name, key) for name, (_, right) in CALLS.items() for key in right if key in (*ODD, *NUMBERS)])
def test_a_number_out_of_range_or_of_another_kind_is_refused(name: str, which: str) -> None:
    call, right = CALLS[name]
    for odd in ODD.get(which, COUNTS):
        with pytest.raises(LayoutError, match=which.split("_")[0]) as refused:
            call(**{**right, which: odd})
        assert repr(odd) in str(refused.value.got)
    call(**{**right, which: (np.float32 if which == "timeout_s" else np.int64)(right[which])})


def masked_tensor() -> Any:
    return torch.masked.masked_tensor(torch.ones(SHAPE), torch.eye(*SHAPE) > 0)


@pytest.mark.parametrize("made", [lambda: np.ma.masked_array(ARRAY, mask=ARRAY > 3), lambda: ARRAY.astype(object), masked_tensor])
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_an_array_that_is_more_than_its_bytes_is_refused(made: Callable[[], object]) -> None:
    for call in (reshard.digest, lambda array: bound(array, ARRAY + 0), lambda array: bound(ARRAY, array)):
        with pytest.raises(LayoutError, match="array"):
            call(made())


def test_a_closed_exchanger_says_so() -> None:
    exchanger = bound()
    exchanger.close()
    exchanger.close()
    for use in (exchanger.run, exchanger.bind):
        with pytest.raises(InvariantBroken, match="an exchanger that is closed was used again; make a new one"):
            use()
