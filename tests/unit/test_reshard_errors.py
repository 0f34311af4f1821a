"""Layouts that cannot be planned, and arrays that do not match their layout."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from reshard_ranks import run_ranks

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, LayoutError, UserError
from asyncmoe.reshard import PADDING, Box, LayoutBuilder, LocalTransport, Piece, RankLayout, Storage, buckets, exchange, plan, plan_each
from asyncmoe.reshard.memory import DeviceBuffer

TENSORS = {"w": (4, 6), "b": (6,)}
W, B = Box((0, 0), (4, 6)), Box((0,), (6,))


def whole(rank: int = 0) -> RankLayout:
    storages = {"sw": Storage((4, 6), "float32"), "sb": Storage((6,), "float32")}
    return RankLayout(rank, storages, (Piece("w", W, "sw", 0, (6, 1)), Piece("b", B, "sb", 0, (1,))))


def with_piece(number: int, **changes: Any) -> RankLayout:
    layout = whole(7)
    pieces = list(layout.pieces)
    pieces[number] = replace(pieces[number], **changes)
    return replace(layout, pieces=tuple(pieces))


def with_storage(shape: tuple[int, ...], dtype: str) -> RankLayout:
    return replace(whole(7), storages={**whole().storages, "sb": Storage(shape, dtype)})


def one(size: tuple[int, ...], *pieces: Piece, rank: int = 7) -> RankLayout:
    return RankLayout(rank, {"s": Storage(size, "float32")}, pieces)


def rows(*parts: tuple[int, int, int], rank: int = 7, size: int = 4) -> RankLayout:
    """Rows of w in a storage, of (first, number, place)."""
    return one((size, 6), *(Piece("w", Box((start, 0), (count, 6)), "s", at * 6, (6, 1)) for start, count, at in parts), rank=rank)


ON_BOTH_SIDES = {
    "unknown tensor": (with_piece(1, tensor="nope"), "tensor nope box", "an unknown tensor"),
    "unknown storage": (with_piece(1, storage="nope"), "tensor b box", "an unknown storage"),
    "box outside the tensor": (with_piece(1, box=Box((1,), (6,))), "tensor b box [1:7]", "within the tensor"),
    "negative start": (with_piece(1, box=Box((-1,), (6,))), "tensor b", "within the tensor"),
    "empty box": (with_piece(1, box=Box((0,), (0,))), "tensor b box [0:0]", "at least one element"),
    "box of other dimensions": (with_piece(0, box=B, strides=(1,)), "tensor w", "dimensions"),
    "strides of other dimensions": (with_piece(0, strides=(1,)), "tensor w", "1 strides"),
    "beyond the storage": (with_piece(1, offset=1), "tensor b box [0:6]", "within the storage"),
    "negative offset": (with_piece(1, offset=-1), "tensor b", "within the storage"),
    "unknown dtype": (with_storage((6,), "float31"), "storage sb", "float31"),
    "negative shape": (with_storage((-1, 6), "float32"), "storage sb", "(-1, 6)"),
    "too many dimensions": (with_storage((1,) * 5, "float32"), "storage sb", "at most 4"),
    "two elements in one place": (
        one((24,), Piece("w", W, "s", 0, (6, 1)), Piece("b", B, "s", 18, (1,))),
        "box [18:19]",
        "2 pieces (w, b)",
    ),
    "not as boxes": (one((30,), Piece("w", W, "s", 0, (1, 4)), Piece("b", B, "s", 23, (1,))), "box [23:24]", "2 pieces (w, b)"),
    "one element for many": (with_piece(0, strides=(0, 1)), "storage sw box [0:1, 0:1]", "4 pieces"),
}
OF_DESTINATIONS = {
    "another dtype": (with_storage((6,), "float16"), "tensor b box [0:6]", "got float16, but float32 in rank 0"),
    "hole at the end": (rows((0, 3, 0)), "storage s box [3:4, 0:1]", "0 pieces"),
    "hole at the start": (rows((1, 3, 1)), "storage s box [0:1, 0:1]", "0 pieces"),
    "overlap as large as the hole": (rows((0, 2, 0), (2, 1, 2), (3, 1, 2)), "storage s box [2:3, 0:1]", "2 pieces (w, w)"),
    "no piece at all": (rows(), "storage s box [0:1, 0:1]", "0 pieces"),
    "padding that is not declared": (rows((0, 4, 0), size=5), "storage s box [4:5, 0:1]", "0 pieces"),
}


@pytest.mark.parametrize(("case", "is_source"), [*product(ON_BOTH_SIDES, (True, False)), *product(OF_DESTINATIONS, (False,))])
def test_a_bad_layout(case: str, is_source: bool) -> None:
    layout, place, said = (ON_BOTH_SIDES | OF_DESTINATIONS)[case]
    with pytest.raises(LayoutError) as caught:
        plan(TENSORS, *([whole(), layout], [whole(8)]) if is_source else ([whole()], [layout]))
    assert all(words in str(caught.value) for words in ("rank 7", place, said)), caught.value


def test_a_rank_has_one_layout_and_a_number() -> None:
    with pytest.raises(LayoutError, match="rank 3: got 2 layouts"):
        plan(TENSORS, [whole(3), whole(3)], [])
    with pytest.raises(LayoutError, match="rank of a layout: got -1"):
        plan(TENSORS, [whole(-1)], [])


@pytest.mark.parametrize("tensors", [{"x": (-1, 6)}, {"x": (1, 1, 1, 1, 1)}, {PADDING: (1,)}])
def test_bad_tensors(tensors: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(LayoutError, match="tensor"):
        plan(tensors, [], [])


def test_a_missing_element_is_named() -> None:
    source = [rows((0, 1, 0), rank=0, size=1), rows((2, 2, 0), rank=1, size=2)]
    with pytest.raises(LayoutError, match=r"rank 7: tensor w .*no source for \[1:2, 0:1\] of w"):
        plan(TENSORS, source, [rows((0, 4, 0))])


def test_a_source_may_have_holes_and_lie_scattered() -> None:
    """Only what lies twice in one place is wrong: here w is transposed behind a gap, and b begins after its last element."""
    source = one((40,), Piece("w", W, "s", 3, (1, 4)), Piece("b", B, "s", 27, (1,)), rank=0)
    flat = one((30,), Piece("b", B, "s", 24, (1,)), Piece("w", W, "s", 0, (1, 4)))
    assert plan(TENSORS, [source], [flat]).wire_bytes == 4 * 30


def test_ranks_and_tensors_with_nothing_to_move() -> None:
    shape = (2, 6)
    held = [RankLayout(r, {"s": Storage((1, 6), "float32")}, (Piece("x", Box((r, 0), (1, 6)), "s", 0, (6, 1)),)) for r in range(2)]
    source = [*held, RankLayout(2, {}, ()), RankLayout(3, {"z": Storage((0, 6), "float32")}, ())]
    wanted = [RankLayout(4, {"s": Storage(shape, "float32")}, (Piece("x", Box((0, 0), shape), "s", 0, (6, 1)),)), RankLayout(5, {}, ())]
    made = plan({"x": shape, "z": (0, 6)}, source, wanted)
    assert made.wire_bytes == 4 * 12
    got = {4: {"s": np.zeros(shape, np.float32)}, 5: {}}
    values = {r: {"s": np.full((1, 6), r + 1, np.float32)} if r < 2 else {"z": np.zeros((0, 6), np.float32)} for r in range(4)}
    run_ranks(made, values, got)
    np.testing.assert_array_equal(got[4]["s"], [[1] * 6, [2] * 6])
    assert plan({"x": shape, "z": (0, 6)}, source, wanted, ranks=[3]).transfers == ()
    exchange(plan(TENSORS, [whole()], []), LocalTransport())
    assert plan_each(TENSORS, [whole()], []) == []


def test_cost_does_not_depend_on_elements() -> None:
    """A trillion elements in one flat bucket, and a column shard of them: nothing of that size is made."""
    side = 1 << 20
    tensors = {"a": (side, side), "b": (side, side)}
    builder = LayoutBuilder(0, "bfloat16")
    for name, shape in tensors.items():
        builder.stack(name, [(name, Box((0, 0), shape))])
    (bucket,) = buckets(builder.build(), 1 << 62)
    assert plan(tensors, [builder.build()], [bucket.layout.at(1)]).wire_bytes == 4 << 40
    columns = LayoutBuilder(1, "bfloat16")
    columns.stack("s", [(name, Box((0, 7), (side, 5))) for name in tensors])
    assert plan(tensors, [builder.build()], [columns.build()]).wire_bytes == 20 << 20


def test_builder_refuses_what_does_not_fit() -> None:
    builder = LayoutBuilder(0, "float32")
    builder.stack("s", [("w", W)])
    with pytest.raises(LayoutError, match="placed twice"):
        builder.stack("s", [("w", W)])
    for wrong in [(1, 0), (0,), (0, -1), (0, 0, 0)]:
        with pytest.raises(LayoutError, match=r"storage t: got corner \("):
            builder.place("t", (4, 6), [("w", W, wrong)])
    for parts in ([], [("w", W), ("b", B)]):
        with pytest.raises(LayoutError, match="storage t: got boxes of"):
            builder.stack("t", parts)


# ---------------------------------------------------------------- arrays

LOCAL = plan(TENSORS, [whole()], [whole()])


def arrays(value: float = 1.0) -> dict[str, np.ndarray]:
    return {"sw": np.full((4, 6), value, np.float32), "sb": np.full(6, value, np.float32)}


def freed() -> torch.Tensor:
    tensor = torch.zeros(4, 6)
    tensor.untyped_storage().resize_(0)
    return tensor


BAD_ARRAYS = {
    "another dtype": (np.zeros((4, 6), np.float64), "float64"),
    "same width, another kind": (np.zeros((4, 6), np.int32), "int32"),
    "too small": (np.zeros((4, 5), np.float32), "80 bytes"),
    "of the transposed shape": (np.zeros((6, 4), np.float32), "shape [6, 4], expected [4, 6]"),
    "bytes, of the transposed shape": (np.zeros((6, 16), np.uint8), "shape [6, 16], expected [4, 24]"),
    "transposed": (np.zeros((6, 4), np.float32).T, "row-major"),
    "torch, transposed": (torch.zeros(6, 4).T, "row-major"),
    "torch, another dtype": (torch.zeros(4, 6, dtype=torch.bfloat16), "bfloat16"),
    "torch, freed": (freed(), "0 of 96 bytes"),
    "torch, sparse": (torch.zeros(4, 6).to_sparse(), "row-major"),
    "torch, nowhere": (torch.zeros(4, 6, device="meta"), "device meta"),
    "read-only": (bytes(96), "read-only"),
    "other byte order": (np.zeros((4, 6), ">f4"), "byte order"),
    "no array": ([1.0] * 24, "list"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_array(case: str) -> None:
    array, said = BAD_ARRAYS[case]
    with pytest.raises(LayoutError, match="destination array sw") as caught:
        exchange(LOCAL, LocalTransport(), arrays(), {**arrays(), "sw": array})
    assert said in str(caught.value)


@pytest.mark.parametrize("places", [(0, 24, 0, 40), (0, 24, 23, 50), (0, 3, 50, 12), (0, 24, 30, 53), (0, 10, 30, 54)])
def test_what_is_written_has_memory_of_its_own(places: tuple[int, ...]) -> None:
    """Where w and b are read, and written: over a source, over its end, within one beyond another, over the other; only read twice."""
    memory = np.arange(90, dtype=np.float32)
    w, b, to_w, to_b = (memory[place : place + size] for place, size in zip(places, (24, 6, 24, 6), strict=True))
    said = r"rank 0: .* array s[wb]: got memory that is also in rank 0: .* array s[wb]"
    with pytest.raises(LayoutError, match=said) if places[3] != 54 else nullcontext():
        exchange(LOCAL, LocalTransport(), {"sw": w, "sb": b}, {"sw": to_w, "sb": to_b})


GOOD_ARRAYS = {
    "numpy": lambda: np.zeros((4, 6), np.float32),
    "raw bytes": lambda: np.zeros(96, np.uint8),
    "raw words": lambda: np.zeros(24, np.uint32),
    "bytearray": lambda: bytearray(96),
    "bytes of each row": lambda: np.zeros((4, 24), np.uint8),
    "with a dimension of one": lambda: torch.zeros(4, 1, 6),
    "torch parameter": lambda: torch.nn.Parameter(torch.zeros(4, 6)),
    "part of a torch tensor": lambda: torch.zeros(2, 4, 6)[1],
}


@pytest.mark.parametrize("case", GOOD_ARRAYS)
def test_arrays_of_many_kinds(case: str) -> None:
    array: Any = GOOD_ARRAYS[case]()
    source = {"sw": np.arange(24, dtype=np.float32), "sb": np.zeros(6, np.float32)}
    exchange(LOCAL, LocalTransport(), source, {**arrays(), "sw": array})
    held = array.detach().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
    np.testing.assert_array_equal(held.reshape(-1).view(np.float32), source["sw"])
    back = arrays(0)
    exchange(LOCAL, LocalTransport(), {**source, "sw": array}, back)
    np.testing.assert_array_equal(back["sw"].reshape(-1), source["sw"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64", "bool"])
def test_torch_dtypes(dtype: str) -> None:
    layout = LayoutBuilder(0, dtype)
    layout.stack("s", [("b", B)])
    source = torch.tensor([0, 1, 0, 1, 1, 0]).to(getattr(torch, dtype))
    destination = torch.zeros_like(source)
    exchange(plan(TENSORS, [layout.build()], [layout.build()]), LocalTransport(), {"s": source}, {"s": destination})
    assert torch.equal(source, destination)


def test_ranks_without_arrays_or_without_a_part_are_named() -> None:
    with pytest.raises(LayoutError, match="rank 0: source array sw"):
        exchange(LOCAL, LocalTransport(), None, arrays())
    made = plan(TENSORS, [whole(0)], [whole(1)])
    with pytest.raises(InvariantBroken, match=r"ranks \[0, 1\]"):
        exchange(made, LocalTransport(0), arrays(), None)
    with pytest.raises(LayoutError, match="rank 5 of the transport: got arrays"):
        exchange(made, LocalTransport(5), arrays(), arrays())


# ---------------------------------------------------------------- buckets


def test_buckets() -> None:
    builder = LayoutBuilder(0, "float32")
    sizes = {"a": 4, "b": 6, "c": 20, "d": 2, "e": 3}
    for name, size in sizes.items():
        dtype = "bfloat16" if name == "b" else "float32"
        builder.place(name, (size,), [(f"t{name}", Box((0,), (size,)), (0,))], dtype)
    layout = builder.build()
    made = buckets(layout, 20)
    assert [bucket.names for bucket in made] == [("a",), ("c",), ("d", "e"), ("b",)]
    assert [bucket.nbytes for bucket in made] == [16, 80, 20, 12]
    assert (made[2].shapes, made[2].dtypes) == (((2,), (3,)), ("float32", "float32"))
    values = {name: np.arange(size, dtype=np.float32) + 10 * size for name, size in sizes.items() if name != "b"}
    flat = np.zeros(20, np.uint8)
    tensors = {f"t{name}": (size,) for name, size in sizes.items()}
    exchange(plan(tensors, [layout], [made[2].layout]), LocalTransport(), values, {"bucket": flat})
    np.testing.assert_array_equal(flat.view(np.float32), np.concatenate([values["d"], values["e"]]))
    assert [bucket.names for bucket in buckets(layout, 1 << 20)] == [("a", "c", "d", "e"), ("b",)]
    assert [bucket.names for bucket in buckets(layout, 24, {"b", "c", "e"})] == [("a", "c"), ("d", "e"), ("b",)]
    assert [bucket.nbytes for bucket in buckets(layout, 10, {"a", "d", "e"})] == [16, 100, 12]


@pytest.mark.skipif(_C.CUDA, reason="this build has CUDA kernels")
def test_arrays_of_a_gpu_need_a_build_with_kernels() -> None:
    source, got = (
        {name: DeviceBuffer(array, array.ctypes.data, array.nbytes, "cuda:0") for name, array in arrays().items()} for _ in range(2)
    )
    with pytest.raises(UserError, match=r"GPU 0: got a build without CUDA kernels.*ASYNCMOE_CUDA=1"):
        exchange(LOCAL, LocalTransport(), source, got)
