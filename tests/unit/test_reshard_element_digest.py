"""The canonical digest of boxes, compiled and by torch, against its definition in Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import asyncmoe.reshard._C as _C
from asyncmoe.reshard import element_digest
from asyncmoe.reshard.element_digest import element_sums, seed_of, sum_of_terms

WORD = (1 << 64) - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)
BOXES = [
    # array, first, rows, elements of a row, index, distance of rows, place
    *((0, 0, 1, 333, 0, 0, 0), (1, 3, 7, 5, (1 << 40) + 1, 9, 2), (1, 50, 1, 1, 17, 0, 0), (2, 1, 3, 11, 100, 1000, 2)),
    *((0, 334, 0, 5, 3, 5, 0), (3, 2, 4, 0, 3, 5, 0), (3, 5, 13, 3, 2, 3, 3)),
]
SEEDS = np.array([seed_of("a"), 0, WORD, seed_of("b")], np.uint64)


def mixed(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def defined(array: torch.Tensor, box: tuple[int, ...]) -> int:
    _, first, rows, count, index, step, place = box
    item, total = array.element_size(), 0
    raw = array.view(torch.uint8).numpy().tobytes()
    for number in range(rows * count):
        bits = int.from_bytes(raw[(first + number) * item : (first + number + 1) * item], "little")
        at = index + number // count * step + number % count
        total += mixed(int(SEEDS[place]) + (at + 1) * 0x9E3779B97F4A7C15 + bits & WORD)
    return total & WORD


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_are_those_of_the_definition(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_digest, "_AT_A_TIME", 10)
    arrays = [(torch.randn(340) * 50).to(dtype) for dtype in DTYPES]
    wanted = [0] * len(SEEDS)
    for box in BOXES:
        array, first, rows, count, index, step, place = box
        want = defined(arrays[array], box)
        assert sum_of_terms(arrays[array][first : first + rows * count], count, index, step, int(SEEDS[place])) == want
        wanted[place] = wanted[place] + want & WORD
    assert element_sums(arrays, np.array(BOXES), SEEDS, threads).tolist() == wanted


def test_boxes_of_several_tasks_add_up() -> None:
    values = torch.randn(3, 400_001)
    whole = np.array([(0, 0, 3, 400_001, 5, 400_001, 0)])
    parts = np.array([(0, 0, 1, 777_777, 5, 0, 0), (0, 777_777, 1, 422_226, 777_782, 0, 0)])
    sums = {element_sums([values], boxes, SEEDS, threads)[0] for boxes in (whole, parts) for threads in (1, 2)}
    assert sums == {sum_of_terms(values.view(-1), 400_001, 5, 400_001, int(SEEDS[0]))}


@pytest.mark.parametrize("row", [(0, 3, 1, 1, 0, 0, 0), (0, 4, -1, 1, 0, 0, 0), (0, 4, 1, 1, 0, 0, 4), (0, 4, 1, 1, 0, 0, -1)])
def test_the_extension_refuses(row: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="box 0 of elements"):
        _C.element_sums(np.array([row], np.int64), SEEDS.view(np.int64))
