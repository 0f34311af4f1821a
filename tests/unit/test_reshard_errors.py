"""Layouts that cannot be planned, and arrays that are not what their layout says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from reshard_ranks import run_ranks

from asyncmoe.errors import InvariantBroken, LayoutError, UserError
from asyncmoe.reshard import PADDING, Box, LayoutBuilder, LocalTransport, Piece, RankLayout, Storage, buckets, exchange, plan, plan_each

TENSORS = {"w": (4, 6), "b": (6,)}
W, B = Box((0, 0), (4, 6)), Box((0,), (6,))


def whole(rank: int = 0) -> RankLayout:
    storages = {"sw": Storage((4, 6), "float32"), "sb": Storage((6,), "float32")}
    return RankLayout(rank, storages, (Piece("w", W, "sw", 0, (6, 1)), Piece("b", B, "sb", 0, (1,))))


def freed() -> torch.Tensor:
    tensor = torch.zeros(4, 6)
    tensor.untyped_storage().resize_(0)
    return tensor


def with_piece(layout: RankLayout, number: int, **changes: object) -> RankLayout:
    pieces = list(layout.pieces)
    pieces[number] = replace(pieces[number], **changes)
    return replace(layout, pieces=tuple(pieces))


def with_dtype(layout: RankLayout, storage: str, dtype: str) -> RankLayout:
    return replace(layout, storages={**layout.storages, storage: Storage(layout.storages[storage].shape, dtype)})


def rows(rank: int, *parts: tuple[int, int], shape: tuple[int, ...] = (4, 6), gap: int = 0) -> RankLayout:
    """Rows of w, part after part, in one storage."""
    pieces, at = [], gap
    for start, count in parts:
        pieces.append(Piece("w", Box((start, 0), (count, 6)), "s", at * 6, (6, 1)))
        at += count
    return RankLayout(rank, {"s": Storage(shape, "float32")}, tuple(pieces))


def overlap_and_hole(rank: int) -> RankLayout:
    """Four rows' worth of pieces in four rows: the third lies there twice, the last not at all."""
    places = [((0, 2), 0), ((2, 1), 2), ((3, 1), 2)]
    pieces = tuple(Piece("w", Box((start, 0), (count, 6)), "s", at * 6, (6, 1)) for (start, count), at in places)
    return RankLayout(rank, {"s": Storage((4, 6), "float32")}, pieces)


BAD_DESTINATIONS: list[tuple[str, Callable[[], RankLayout], list[str]]] = [
    ("unknown tensor", lambda: with_piece(whole(7), 1, tensor="nope"), ["rank 7", "nope", "[0:6]", "unknown tensor"]),
    ("unknown storage", lambda: with_piece(whole(7), 1, storage="nope"), ["rank 7", "tensor b", "nope", "unknown storage"]),
    ("box outside the tensor", lambda: with_piece(whole(7), 1, box=Box((1,), (6,))), ["rank 7", "tensor b", "1:7", "within the tensor"]),
    ("negative start", lambda: with_piece(whole(7), 1, box=Box((-1,), (6,))), ["rank 7", "tensor b", "within the tensor"]),
    ("empty box", lambda: with_piece(whole(7), 1, box=Box((0,), (0,))), ["rank 7", "tensor b", "within the tensor"]),
    ("box of other dimensions", lambda: with_piece(whole(7), 0, box=B, strides=(1,)), ["rank 7", "tensor w", "dimensions"]),
    ("strides of other dimensions", lambda: with_piece(whole(7), 0, strides=(1,)), ["rank 7", "tensor w", "1 strides"]),
    ("beyond the storage", lambda: with_piece(whole(7), 1, offset=1), ["rank 7", "tensor b", "[0:6]", "within the storage"]),
    ("negative offset", lambda: with_piece(whole(7), 1, offset=-1), ["rank 7", "tensor b", "within the storage"]),
    ("unknown dtype", lambda: with_dtype(whole(7), "sb", "float31"), ["rank 7", "sb", "float31"]),
    ("another dtype", lambda: with_dtype(whole(7), "sb", "float16"), ["rank 7", "tensor b", "[0:6]", "float16", "float32", "rank 0"]),
    ("hole at the end", lambda: rows(7, (0, 3)), ["rank 7", "storage s", "[3:4, 0:6]", "0 pieces"]),
    ("hole at the start", lambda: rows(7, (1, 3), gap=1), ["rank 7", "storage s", "[0:1, 0:6]", "0 pieces"]),
    ("overlap as large as the hole", lambda: overlap_and_hole(7), ["rank 7", "storage s", "[2:3, 0:6]", "2 pieces"]),
    ("no piece at all", lambda: rows(7), ["rank 7", "storage s", "[0:4, 0:6]", "0 pieces"]),
    ("overlap", lambda: replace(whole(7), pieces=(*whole().pieces, Piece("w", Box((0, 0), (1, 2)), "sw", 7, (6, 1)))), ["[1:2, 1:3]", "2"]),
    ("written through itself", lambda: with_piece(whole(7), 0, strides=(0, 1)), ["rank 7", "storage sw"]),
]  # fmt: skip


@pytest.mark.parametrize(("made", "words"), [case[1:] for case in BAD_DESTINATIONS], ids=[case[0] for case in BAD_DESTINATIONS])
def test_bad_destination(made: Callable[[], RankLayout], words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        plan(TENSORS, [whole()], [made()])
    assert isinstance(caught.value, UserError)
    for word in words:
        assert word in str(caught.value)


def two_in_one_place(rank: int) -> RankLayout:
    """The second half of w and all of b claim the same elements."""
    pieces = (Piece("w", W, "s", 0, (6, 1)), Piece("b", B, "s", 18, (1,)))
    return RankLayout(rank, {"s": Storage((24,), "float32")}, pieces)


def transposed_and_flat(rank: int) -> RankLayout:
    """A transposed matrix is no box of a flat storage; b lies on its last element."""
    pieces = (Piece("w", W, "s", 0, (1, 4)), Piece("b", B, "s", 23, (1,)))
    return RankLayout(rank, {"s": Storage((30,), "float32")}, pieces)


BAD_SOURCES: list[tuple[str, Callable[[], RankLayout], list[str]]] = [
    ("unknown tensor", lambda: with_piece(whole(7), 1, tensor="nope"), ["rank 7", "nope", "[0:6]", "unknown tensor"]),
    ("box outside the tensor", lambda: with_piece(whole(7), 1, box=Box((1,), (6,))), ["rank 7", "tensor b", "1:7", "within the tensor"]),
    ("empty box", lambda: with_piece(whole(7), 1, box=Box((0,), (0,))), ["rank 7", "tensor b", "[0:0]", "at least one element"]),
    ("beyond the storage", lambda: with_piece(whole(7), 1, offset=1), ["rank 7", "tensor b", "[0:6]", "within the storage"]),
    ("two elements in one place", lambda: two_in_one_place(7), ["rank 7", "storage s", "[18:24]", "2 pieces (w, b)", "1 at most"]),
    ("two elements in one place, not as boxes", lambda: transposed_and_flat(7), ["rank 7", "storage s", "[23:24]", "2 pieces"]),
    ("one element for many", lambda: with_piece(whole(7), 0, strides=(0, 1)), ["rank 7", "storage sw", "[0:1, 0:1]", "4 pieces"]),
    ("fractional start", lambda: with_piece(whole(7), 1, box=Box((0.5,), (5,))), ["rank 7", "tensor b", "0.5", "sb", "integers"]),  # type: ignore[arg-type]
    ("fractional offset", lambda: with_piece(whole(7), 1, offset=0.0), ["rank 7", "tensor b", "offset 0.0", "integers"]),
    ("an offset beyond 64 bits", lambda: with_piece(whole(7), 1, offset=1 << 63), ["rank 7", "tensor b", "integers of 64 bits"]),
    ("negative rank", lambda: whole(-1), ["rank of a layout: got -1"]),
    ("negative shape", lambda: RankLayout(7, {"s": Storage((-1, 6), "float32")}, ()), ["rank 7", "storage s", "(-1, 6)"]),
    ("too many dimensions", lambda: RankLayout(7, {"s": Storage((1,) * 5, "float32")}, ()), ["rank 7", "storage s", "at most 4"]),
]  # fmt: skip


@pytest.mark.parametrize(("made", "words"), [case[1:] for case in BAD_SOURCES], ids=[case[0] for case in BAD_SOURCES])
def test_bad_source(made: Callable[[], RankLayout], words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        plan(TENSORS, [whole(), made()], [whole(8)])
    for word in words:
        assert word in str(caught.value)


def test_a_source_may_have_holes_and_lie_scattered() -> None:
    """Only what lies twice in one place is wrong: here w is transposed behind a gap, and b begins after its last element."""
    pieces = (Piece("w", W, "s", 3, (1, 4)), Piece("b", B, "s", 27, (1,)))
    assert plan(TENSORS, [RankLayout(0, {"s": Storage((40,), "float32")}, pieces)], [whole(1)]).wire_bytes == 4 * 30


@pytest.mark.parametrize("shape", [(-1, 6), (1.5,), (1, 1, 1, 1, 1)])
def test_bad_tensors(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="tensor x"):
        plan({"x": shape}, [], [])


def test_a_tensor_without_elements_is_nothing_to_move() -> None:
    nothing = {"s": Storage((0, 6), "float32")}
    made = plan({"z": (0, 6)}, [RankLayout(0, nothing, ())], [RankLayout(1, nothing, ())])
    assert (made.wire_bytes, made.transfers) == (0, ())


def test_more_ranks_than_pieces() -> None:
    """Some ranks have nothing to send, some nothing to receive, some neither: they are part of the plan and are idle."""
    shape, count = (2, 6), 5
    one = [RankLayout(rank, {"s": Storage((1, 6), "float32")}, (Piece("x", Box((rank, 0), (1, 6)), "s", 0, (6, 1)),)) for rank in range(2)]
    idle = [RankLayout(rank, {}, ()) for rank in range(2, count)]
    wanted = [RankLayout(4, {"s": Storage(shape, "float32")}, (Piece("x", Box((0, 0), shape), "s", 0, (6, 1)),)), RankLayout(5, {}, ())]
    made = plan({"x": shape}, [*one, *idle], wanted)
    assert made.wire_bytes == 4 * 12
    got = {4: {"s": np.zeros(shape, np.float32)}, 5: {}}
    held = {rank: {"s": np.full((1, 6), rank + 1, np.float32)} if rank < 2 else {} for rank in range(count)}
    run_ranks(made, held, got)
    np.testing.assert_array_equal(got[4]["s"], [[1] * 6, [2] * 6])
    for rank in (2, 3, 5):
        part = plan({"x": shape}, [*one, *idle], wanted, ranks=[rank])
        assert (part.transfers, part.digest) == ((), made.digest)


def test_a_bucket_smaller_than_an_element_is_refused_before_anything_moves() -> None:
    source, made = arrays(), plan(TENSORS, [whole(0)], [whole(1)], ranks=[0])
    with pytest.raises(LayoutError, match=r"bucket_bytes, for a box .* of storage s[wb] from rank 0 to rank 1.*one element of 4 bytes"):
        exchange(made, LocalTransport(0), source, None, bucket_bytes=3)


def test_a_missing_element_is_named() -> None:
    source = [rows(0, (0, 1), shape=(1, 6)), rows(1, (2, 2), shape=(2, 6))]
    with pytest.raises(LayoutError) as caught:
        plan(TENSORS, source, [rows(7, (0, 4))])
    for word in ("rank 7", "tensor w", "no source for [1:2, 0:6] of w"):
        assert word in str(caught.value)


def test_a_rank_has_one_layout() -> None:
    with pytest.raises(LayoutError, match="rank 3: got 2 layouts"):
        plan(TENSORS, [whole(3), whole(3)], [whole(7)])


def test_a_source_may_hold_more_than_it_says() -> None:
    source = rows(0, (0, 4), shape=(6, 6), gap=1)
    assert plan(TENSORS, [source], [rows(7, (0, 4))]).wire_bytes == 4 * 24


def test_transposed_and_flat_storages_are_not_mistaken_for_overlaps() -> None:
    flat = RankLayout(
        7, {"s": Storage((30,), "float32")}, (Piece("b", B, "s", 24, (1,)), Piece("w", W, "s", 0, (1, 4)))
    )  # a transposed matrix in a flat storage is no box of it: the element-wise test decides
    assert plan(TENSORS, [whole()], [flat]).wire_bytes == 4 * 30
    with pytest.raises(LayoutError, match=r"storage s box \[23:24\]: got 2"):
        plan(TENSORS, [whole()], [with_piece(flat, 0, offset=23)])


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


def test_padding_is_declared_not_assumed() -> None:
    padded = rows(7, (0, 4), shape=(5, 6))
    with pytest.raises(LayoutError, match=r"\[4:5, 0:6\]"):
        plan(TENSORS, [whole()], [padded])
    zeros = Piece(PADDING, Box((0, 0), (1, 6)), "s", 24, (6, 1))
    made = plan(TENSORS, [whole(7)], [replace(padded, pieces=(*padded.pieces, zeros))])
    destination = np.full((5, 6), np.nan, np.float32)
    exchange(made, LocalTransport(7), {"sw": np.ones((4, 6), np.float32)}, {"s": destination})
    np.testing.assert_array_equal(destination, [[1] * 6] * 4 + [[0] * 6])
    with pytest.raises(LayoutError, match="reserved"):
        plan({PADDING: (1,)}, [], [])


def test_builder_refuses_what_does_not_fit() -> None:
    builder = LayoutBuilder(0, "float32")
    builder.stack("s", [("w", W)])
    with pytest.raises(LayoutError, match="placed twice"):
        builder.stack("s", [("w", W)])
    for wrong in [(1, 0), (0,), (0, -1), (0, 0, 0)]:
        with pytest.raises(LayoutError, match=r"storage t: got corner \("):
            builder.place("t", (4, 6), [("w", W, wrong)])
    with pytest.raises(LayoutError, match=r"storage t: got boxes of \[\], expected one or more"):
        builder.stack("t", [])


def test_nothing_to_do() -> None:
    empty = plan(TENSORS, [whole()], [])
    assert empty.transfers == ()
    exchange(empty, LocalTransport())
    assert plan_each(TENSORS, [whole()], []) == []


# ---------------------------------------------------------------- arrays

LOCAL = plan(TENSORS, [whole()], [whole()])


def arrays(value: float = 1.0) -> dict[str, np.ndarray]:
    return {"sw": np.full((4, 6), value, np.float32), "sb": np.full(6, value, np.float32)}


def read_only() -> np.ndarray:
    array = np.zeros((4, 6), np.float32)
    array.flags.writeable = False
    return array


BAD_ARRAYS: list[tuple[str, Callable[[], object], str]] = [
    ("another dtype", lambda: np.zeros((4, 6), np.float64), "float64"),
    ("same width, another kind", lambda: np.zeros((4, 6), np.int32), "int32"),
    ("too small", lambda: np.zeros((4, 5), np.float32), "80 bytes"),
    ("of the transposed shape", lambda: np.zeros((6, 4), np.float32), "shape [6, 4], expected [4, 6]"),
    ("of another shape", lambda: np.zeros((2, 2, 6), np.float32), "shape [2, 2, 6]"),
    ("bytes, of the transposed shape", lambda: np.zeros((6, 16), np.uint8), "shape [6, 16], expected [4, 24]"),
    ("transposed", lambda: np.zeros((6, 4), np.float32).T, "row-major"),
    ("torch, transposed", lambda: torch.zeros(6, 4).T, "row-major"),
    ("torch, another dtype", lambda: torch.zeros(4, 6, dtype=torch.bfloat16), "bfloat16"),
    ("torch, freed", freed, "0 of 96 bytes"),
    ("torch, sparse", lambda: torch.zeros(4, 6).to_sparse(), "DLPack"),
    ("read-only", read_only, "read-only"),
    ("bytes", lambda: bytes(96), "read-only"),
    ("other byte order", lambda: np.zeros((4, 6), ">f4"), "byte order"),
    ("no array", lambda: [1.0] * 24, "list"),
]


@pytest.mark.parametrize(("made", "word"), [case[1:] for case in BAD_ARRAYS], ids=[case[0] for case in BAD_ARRAYS])
def test_bad_array(made: Callable[[], object], word: str) -> None:
    with pytest.raises(LayoutError) as caught:
        exchange(LOCAL, LocalTransport(), arrays(), {**arrays(), "sw": made()})
    assert word in str(caught.value)
    assert "destination array sw" in str(caught.value)


@pytest.mark.parametrize("places", [(0, 24, 0, 40), (0, 24, 23, 50), (0, 3, 50, 12), (0, 24, 30, 53), (0, 10, 30, 54)])
def test_what_is_written_has_memory_of_its_own(places: tuple[int, ...]) -> None:
    """Where w and b are read, and written: over a source, over its end, within one beyond another, over the other; only read twice."""
    memory = np.arange(90, dtype=np.float32)
    w, b, to_w, to_b = (memory[place : place + size] for place, size in zip(places, (24, 6, 24, 6), strict=True))
    said = r"rank 0: .* array s[wb]: got memory that is also in rank 0: .* array s[wb]"
    with pytest.raises(LayoutError, match=said) if places[3] != 54 else nullcontext():
        exchange(LOCAL, LocalTransport(), {"sw": w, "sb": b}, {"sw": to_w, "sb": to_b})


def test_a_missing_array_is_named() -> None:
    with pytest.raises(LayoutError, match="rank 0: source array sw"):
        exchange(LOCAL, LocalTransport(), None, arrays())


GOOD_ARRAYS: list[tuple[str, Callable[[], object]]] = [
    ("numpy", lambda: np.zeros((4, 6), np.float32)),
    ("flat", lambda: np.zeros(24, np.float32)),
    ("raw bytes", lambda: np.zeros(96, np.uint8)),
    ("raw words", lambda: np.zeros(24, np.uint32)),
    ("bytearray", lambda: bytearray(96)),
    ("bytes of each row", lambda: np.zeros((4, 24), np.uint8)),
    ("with a dimension of one", lambda: torch.zeros(4, 1, 6)),
    ("torch", lambda: torch.zeros(4, 6)),
    ("torch parameter", lambda: torch.nn.Parameter(torch.zeros(4, 6))),
    ("part of a torch tensor", lambda: torch.zeros(2, 4, 6)[1]),
]


@pytest.mark.parametrize("made", [case[1] for case in GOOD_ARRAYS], ids=[case[0] for case in GOOD_ARRAYS])
def test_arrays_of_many_kinds(made: Callable[[], object]) -> None:
    array = made()
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
    made = plan(TENSORS, [layout.build()], [layout.build()])
    source = torch.tensor([0, 1, 0, 1, 1, 0]).to(getattr(torch, dtype))
    destination = torch.zeros_like(source)
    exchange(made, LocalTransport(), {"s": source}, {"s": destination})
    assert torch.equal(source, destination)


def test_one_process_cannot_carry_out_a_plan_of_two() -> None:
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
    made = buckets(layout, 24)
    assert [bucket.names for bucket in made] == [("a",), ("c",), ("d", "e"), ("b",)]
    assert [bucket.nbytes for bucket in made] == [16, 80, 20, 12]
    assert made[2].shapes == ((2,), (3,))
    assert made[2].dtypes == ("float32", "float32")
    values = {name: np.arange(size, dtype=np.float32) + 10 * size for name, size in sizes.items() if name != "b"}
    flat = np.zeros(20, np.uint8)
    tensors = {f"t{name}": (size,) for name, size in sizes.items()}
    exchange(plan(tensors, [layout], [made[2].layout]), LocalTransport(), values, {"bucket": flat})
    np.testing.assert_array_equal(flat.view(np.float32), np.concatenate([values["d"], values["e"]]))
    assert [bucket.names for bucket in buckets(layout, 1 << 20)] == [("a", "c", "d", "e"), ("b",)]
    assert [bucket.names for bucket in buckets(layout, 24, {"b", "c", "e"})] == [("a", "c"), ("d", "e"), ("b",)]
    assert [bucket.nbytes for bucket in buckets(layout, 10, {"a", "d", "e"})] == [16, 100, 12]
    with pytest.raises(LayoutError, match="bucket_bytes"):
        buckets(layout, 0)
