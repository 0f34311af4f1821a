"""The canonical digest of boxes, compiled and by torch, against its definition in Python's integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard import element_digest
from asyncmoe.reshard.element_digest import element_sums, seed_of, sum_of_terms

WORD = (1 << 64) - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)
BOXES = [
    # array, first, rows, elements of a row, index, distance of rows, place
    (0, 0, 1, 333, 0, 0, 0),
    (1, 3, 7, 5, (1 << 40) + 1, 9, 2),
    (1, 50, 1, 1, 17, 0, 0),
    (2, 1, 3, 11, 100, 1000, 2),
    (0, 334, 0, 5, 3, 5, 0),
    (3, 2, 4, 0, 3, 5, 0),
    (3, 5, 13, 3, 2, 3, 3),
]
SEEDS = np.array([seed_of("a"), 0, WORD, seed_of("b")], np.uint64)


def mixed(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def defined(array: torch.Tensor, box: tuple[int, ...]) -> int:
    _, first, rows, count, index, step, place = box
    item = array.element_size()
    raw = array.view(torch.uint8).numpy().tobytes()
    total = 0
    for row in range(rows):
        for column in range(count):
            at = first + row * count + column
            bits = int.from_bytes(raw[at * item : (at + 1) * item], "little")
            total += mixed(int(SEEDS[place]) + (index + row * step + column + 1) * 0x9E3779B97F4A7C15 + bits & WORD)
    return total & WORD


def arrays() -> list[torch.Tensor]:
    made = [torch.randn(340, generator=torch.Generator().manual_seed(i)) * 50 for i in range(len(DTYPES))]
    return [values.to(dtype) for values, dtype in zip(made, DTYPES, strict=True)]


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_by_place(threads: int) -> None:
    held, wanted = arrays(), [0] * len(SEEDS)
    for box in BOXES:
        wanted[box[-1]] = wanted[box[-1]] + defined(held[box[0]], box) & WORD
    assert element_sums(held, np.array(BOXES), SEEDS, threads).tolist() == wanted
    assert element_sums([one.numpy() if one.dtype != torch.bfloat16 else one for one in held], np.array(BOXES), SEEDS).tolist() == wanted


@pytest.mark.parametrize("box", [box for box in BOXES if box[2] * box[3]])
def test_torch_computes_the_same(box: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_digest, "_AT_A_TIME", 10)
    array, first, rows, count, index, step, place = box
    held = arrays()[array]
    found = sum_of_terms(held[first : first + rows * count], count, index, step, int(SEEDS[place]))
    assert int(found) & WORD == defined(held, box)


def test_boxes_of_several_tasks_add_up() -> None:
    values = torch.randn(3, 400_001)
    whole = np.array([(0, 0, 3, 400_001, 5, 400_001, 0)])
    parts = np.array([(0, 0, 1, 777_777, 5, 0, 0), (0, 777_777, 1, 422_226, 777_782, 0, 0)])
    sums = [element_sums([values], boxes, SEEDS, threads)[0] for boxes in (whole, parts) for threads in (1, 2)]
    by_torch = sum_of_terms(values.view(-1), 400_001, 5, 400_001, int(SEEDS[0]))
    assert {*sums} == {int(by_torch) & WORD}


def test_no_boxes() -> None:
    assert element_sums([], np.empty((0, 7), np.int64), SEEDS).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("row", [(0, 3, 1, 1, 0, 0, 0), (0, 4, -1, 1, 0, 0, 0), (0, 4, 1, 1, 0, 0, 4), (0, 4, 1, 1, 0, 0, -1)])
def test_the_extension_refuses(row: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="box 0 of elements"):
        _C.element_sums(np.array([row], np.int64), SEEDS.view(np.int64))


def test_arrays_with_gaps_are_refused() -> None:
    gaps: Any = torch.zeros(4, 4).T
    with pytest.raises(LayoutError, match="array 0"):
        element_sums([gaps], np.array([(0, 0, 1, 16, 0, 0, 0)]), SEEDS)
