"""The canonical digest of tensors: a sum over their elements, which depends neither on how tensors are cut and placed nor on the order of
the terms.

The term of an element is mix(seed + (index + 1) * 0x9e3779b97f4a7c15 + bits) modulo 2^64 (csrc/element_digest.h): `seed` belongs to the
canonical tensor, `index` is the element's row-major number in the whole tensor, `bits` are the stored bits, zero-extended, and mix is
splitmix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). Changing an element removes one term and
adds another. The digest detects damage; it is not a cryptographic hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.reshard.layout import ITEM_BYTES
from asyncmoe.reshard.memory import Array, memory_of

ARRAY, FIRST, ROWS, COUNT, INDEX, STEP, PLACE = range(7)
"""Columns of boxes: the number of an array, the flat index in it of the box's first element, rows and elements per row, which follow each
other in the array; the first element's index in the canonical tensor, the distance of rows there, and the number of the sum."""
_AT_A_TIME = 1 << 22
"""Elements of a GPU's tensor whose terms exist at a time, 8 bytes each."""
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def seed_of(name: str) -> int:
    """Return the 64-bit seed of a tensor: BLAKE2b of its name in UTF-8, little-endian; the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=b"asyncmoe tensor").digest(), "little")


def element_sums(arrays: Sequence[Array], boxes: np.ndarray, seeds: np.ndarray, threads: int = 0) -> np.ndarray:
    """Return the sums of the terms of boxes: uint64[places], modulo 2^64.

    Args:
        arrays: row-major, in host memory, or torch tensors on a GPU.
        boxes: int64[n, 7], see `ARRAY`; not checked against the arrays' sizes.
        seeds: uint64[places].
        threads: for arrays in host memory; 0: as many as the machine has, at most 4.

    Raises:
        LayoutError: as `memory_of`.
    """
    memories = [memory_of(array, f"array {number} to digest") for number, array in enumerate(arrays)]
    each = [(memory.address, ITEM_BYTES[memory.dtype], memory.device == "cpu") for memory in memories]
    address, item, on_host = np.array(each, np.int64).reshape(-1, 3)[boxes[:, ARRAY]].T
    table = np.column_stack([address + boxes[:, FIRST] * item, item, boxes[:, ROWS:]])
    sums: np.ndarray = _C.element_sums(table[on_host == 1], seeds.view(np.int64), threads)
    for number, first, rows, count, index, step, place in boxes[on_host == 0].tolist():
        elements = arrays[number].detach().view(-1)[first : first + rows * count]
        sums[place] = (int(sums[place]) + sum_of_terms(elements, count, index, step, int(seeds[place]))) % (1 << 64)
    return sums


def sum_of_terms(elements: Any, count: int, index: int, step: int, seed: int) -> int:
    """Return the sum of the terms of one box modulo 2^64, computed by torch on the tensor's device.

    Args:
        elements: flat tensor of the rows of `count` elements; row i begins at element `index + i * step` of the canonical tensor.
    """
    import torch

    item, sums = elements.element_size(), torch.zeros([], dtype=torch.int64, device=elements.device)
    bits = elements.view(getattr(torch, f"int{8 * item}"))
    for begin in range(0, len(elements), _AT_A_TIME):
        part = bits[begin : begin + _AT_A_TIME].long() & _signed((1 << 8 * item) - 1)
        at = torch.arange(begin, begin + len(part), device=elements.device)
        at += at // count * (step - count)
        part += _signed(seed + (index + 1) * _GOLDEN)
        part += at * _signed(_GOLDEN)
        for shift, factor in _MIX:
            part = (part ^ _shifted(part, shift)) * _signed(factor)
        sums += (part ^ _shifted(part, 31)).sum()
    return int(sums) % (1 << 64)


def _shifted(words: Any, bits: int) -> Any:
    """Return int64 words shifted right without their sign."""
    return words >> bits & (1 << 64 - bits) - 1


def _signed(word: int) -> int:
    """Return the int64 with the low 64 bits of a number."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
