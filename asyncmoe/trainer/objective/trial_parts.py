"""Tries a user's loss or weight on parts of sequences, as two context-parallel ranks hold them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import torch

from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.objective.plugin import Plugin
from asyncmoe.trainer.objective.rows import PolicyRows

_MEET_S = 30.0


def try_parts(tried: Plugin, rows: PolicyRows, value: torch.Tensor) -> None:
    """Compare the values of rows in two parts with those of whole sequences: once with every other row in a part, once with the sampled
    rows in one.

    Args:
        value: [T]; what it makes of `rows`, three whole sequences.

    Raises:
        ConfigError: they differ, or it adds up sums over sequences more often for one part than for the other, which would leave a rank
            waiting.
    """
    every_other = torch.arange(len(rows.mask)) % 2 == 0
    for first in (every_other, rows.mask):
        parts = (first, ~first)
        found = torch.zeros_like(value)
        for where, own in zip(parts, _of_parts(tried, rows, parts), strict=True):
            found[where] = own.detach()
        if not torch.allclose(found[rows.mask], value.detach()[rows.mask], rtol=1e-4, atol=1e-5):
            expected = "the same: of whole sequences only rows.sum and rows.mean know, which add up what ranks hold (trainer.cp)"
            raise tried.refused("other values if two ranks hold parts of a sequence", expected)


def _of_parts(tried: Plugin, rows: PolicyRows, parts: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    given: tuple[SimpleQueue[torch.Tensor | None], ...] = (SimpleQueue(), SimpleQueue())
    calls, alone = [0, 0], []

    def one(part: int) -> torch.Tensor:
        def add(tensor: torch.Tensor) -> torch.Tensor:
            calls[part] += 1
            given[1 - part].put(tensor.detach())
            other = given[part].get(timeout=_MEET_S)
            if other is None:
                alone.append(part)
                raise InvariantBroken("the other part has no more sums")
            return tensor + other

        try:
            return tried.of_rows(_part(rows, parts[part], add))[0]
        finally:
            given[1 - part].put(None)

    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(one, part) for part in (0, 1)]
    if alone or calls[0] != calls[1]:
        got = "rows.sum or rows.mean called more often for one part of some sequences than for the other"
        raise tried.refused(got, "equally often, whichever rows there are: ranks that hold parts of sequences add up each sum (trainer.cp)")
    return [future.result() for future in made]


def _part(rows: PolicyRows, where: torch.Tensor, add: Callable[[torch.Tensor], torch.Tensor]) -> PolicyRows:
    held = {name: tensor.detach()[where].requires_grad_(tensor.requires_grad) for name, tensor in rows.tensors().items()}
    return replace(rows, **held, over_ranks=add)  # type: ignore[arg-type]
