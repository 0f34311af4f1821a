"""Weights that an engine stores as float8 in blocks of 128 x 128, each with a scale: quantised while they are packed.

The canonical tensor is unchanged. A second tensor has its scales: `<tensor>_scale_inv`, float32, one per block. Likewise a storage with a
part of the tensor gets a storage of scales, with the same suffix (as SGLang names its own, quantization/fp8.py). Blocks of the
storage are blocks of the tensor, so scales are sharded like any other tensor. A source's scales are computed from its weights before an
exchange (`write_scales`); every element is divided by the scale of its block while it is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import (
    ITEM_BYTES,
    PADDING,
    Block,
    BlockPieces,
    BlockStorages,
    Box,
    Piece,
    RankLayout,
    Storage,
    contiguous_strides,
)
from asyncmoe.reshard.memory import Array, memories_of, one_device

BLOCK = 128
"""Rows and columns that share a scale."""
SCALES = "_scale_inv"
"""Suffix of the name of a tensor's or storage's scales. A weight is the stored number times its block's scale."""
FLOAT8 = "float8_e4m3fn"

Chosen = Callable[[str], bool]
"""Returns whether the named tensor is quantised; the result must not depend on the layer's prefix."""


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor's scales: one for every block in the last two dimensions."""
    return (*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:]))


def with_scale_tensors(tensors: Mapping[str, tuple[int, ...]], chosen: Chosen) -> dict[str, tuple[int, ...]]:
    """Return the canonical tensors, followed by the scales of the chosen ones.

    Raises:
        LayoutError: a chosen tensor is not a matrix.
    """
    made = dict(tensors)
    for name, shape in tensors.items():
        if chosen(name):
            if len(shape) != 2:
                raise LayoutError(f"tensor {name}", got=f"shape {shape}", expected="a matrix, to be quantised block by block")
            made[name + SCALES] = scales_shape(shape)
    return made


def with_scales(layout: RankLayout, tensors: Mapping[str, tuple[int, ...]], chosen: Chosen, *, quantised: bool) -> RankLayout:
    """Return a layout with added storages and pieces for the scales of chosen tensors.

    Args:
        tensors: shapes of the canonical tensors, at least of the chosen tensors in the layout.
        quantised: the storages of chosen tensors are float8, as in an engine; otherwise they keep their dtype, as in a source.

    Raises:
        LayoutError: blocks of 128 x 128 of a tensor are not blocks of its storage, or the storage also contains tensors that are not
            chosen; names rank, storage and tensor.
    """
    blocks = tuple(_block_with_scales(block, layout.rank, tensors, chosen, quantised) for block in layout.blocks)
    return RankLayout(layout.rank, BlockStorages(blocks), BlockPieces(blocks))


def _block_with_scales(block: Block, rank: int, tensors: Mapping[str, tuple[int, ...]], chosen: Chosen, quantised: bool) -> Block:
    storages, pieces = dict(block.storages), list(block.pieces)
    held = {piece.storage for piece in pieces if piece.tensor != PADDING and chosen(piece.tensor)}
    front = block.prefixes[0][0]
    for piece in block.pieces:
        if piece.storage in held:
            if not chosen(piece.tensor):
                raise LayoutError(f"rank {rank}: storage {piece.storage}", got=f"{piece.tensor} in it", expected="only quantised tensors")
            pieces.append(_scales(piece, block.storages[piece.storage], tensors[front + piece.tensor], rank))
    for name in [name for name in block.storages if name in held]:  # in the same order on all ranks
        shape = storages[name].shape
        storages[name + SCALES] = Storage(scales_shape(shape), "float32")
        if quantised:
            storages[name] = Storage(shape, FLOAT8)
    return replace(block, storages=storages, pieces=tuple(pieces))


def _scales(piece: Piece, storage: Storage, tensor: tuple[int, ...], rank: int) -> Piece:
    """Return the piece that places the scales of `piece` in the scales of its storage."""
    steps = contiguous_strides(storage.shape)
    corner = [piece.offset // step % extent for step, extent in zip(steps, storage.shape, strict=True)]
    box = piece.box
    whole = all(
        start % BLOCK == at % BLOCK == 0 and (extent % BLOCK == 0 or (start + extent == size and at + extent == room))
        for start, extent, size, at, room in zip(box.start, box.extent, tensor, corner[-2:], storage.shape[-2:], strict=True)
    )
    if not whole or piece.strides != steps[-2:]:
        raise LayoutError(
            f"rank {rank}: tensor {piece.tensor} box {box} in storage {piece.storage}",
            got=f"a place at row {corner[-2]} and column {corner[-1]} of {storage.shape}",
            expected=f"whole blocks of {BLOCK} x {BLOCK}, or the rest at the tensor's end",
            hint=f"choose parallel sizes that divide the tensor at multiples of {BLOCK}",
        )
    corner[-2:] = [at // BLOCK for at in corner[-2:]]
    shape = scales_shape(storage.shape)
    among = Box(tuple(start // BLOCK for start in box.start), scales_shape(box.extent))
    offset = sum(at * step for at, step in zip(corner, contiguous_strides(shape), strict=True))
    return Piece(piece.tensor + SCALES, among, piece.storage + SCALES, offset, contiguous_strides(shape)[-2:])


def write_scales(layout: RankLayout, arrays: Mapping[str, Array], *, power_of_two: bool = False, threads: int = 0, stream: int = 0) -> None:
    """Write the scales of a source's storages; on a GPU, enqueue the computation on `stream`.

    A block's scale is its largest magnitude, at least 1e-4, divided by 448, the largest float8 (as in SGLang's
    quantization/mxfp8_block_convert.py `bf16_to_block_fp8_128`). With `power_of_two` it is rounded up to a power of two, as in the UE8M0
    format (quantization/fp8_utils.py `per_block_cast_to_fp8`).

    Args:
        layout: the source's layout, from `with_scales`.
        arrays: by storage name, the weights and their scales; all in host memory or all on one GPU.

    Raises:
        LayoutError: an array is missing, or does not match its storage.
    """
    where, storages = f"rank {layout.rank}: array", layout.storages
    weights = {name: storages[name] for name in storages if name + SCALES in storages}
    read = memories_of(weights, arrays, where, write=False).values()
    written = memories_of({name + SCALES: storages[name + SCALES] for name in weights}, arrays, where, write=True).values()
    given = [  # of csrc/scales.h
        (values.address, ITEM_BYTES[one.dtype], prod(one.shape[:-1]), one.shape[-1], scales.address)
        for one, values, scales in zip(weights.values(), read, written, strict=True)
    ]
    rows = np.array(given, np.int64).reshape(-1, 5)
    device = one_device((memory.device for memory in (*read, *written)), f"{where}s with scales")
    if device == "cpu":
        _C.scale_blocks(rows, power_of_two, threads)
    else:
        _C.scale_blocks_on_gpu(rows, power_of_two, int(device.partition(":")[2]), stream)
