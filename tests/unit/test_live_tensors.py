"""Bytes of live tensors, next to sizes that are known."""

from __future__ import annotations

import torch

from benchmarks.live_tensors import LiveTensors

KB = 256
"""Elements of a kilobyte of float32."""


def test_storages_count_once_and_until_they_are_freed() -> None:
    before = torch.ones(4 * KB)
    with LiveTensors() as seen:
        view = before[:KB]
        assert seen.now == 0, "made before"
        kept = view + 1
        again = kept.view(2, -1)[0].t()
        kept.add_(1)
        assert seen.now == 1024
        _ = torch.zeros(3 * KB) * 2
        del _
        assert (seen.now, seen.peak, seen.largest) == (1024, 7 * 1024, 3 * 1024)
        del kept
        assert seen.now == 1024, "a view is left"
        del again
        assert seen.now == 0
        seen.restart()
        assert seen.peak == 0
        torch.add(before, 1, out=before)
    assert seen.peak == 0


def test_held_tensors_count_and_an_output_may_be_resized() -> None:
    weight, out = torch.ones(KB), torch.empty(1)
    with LiveTensors([weight, weight[1:], out]) as seen:
        assert seen.now == 1024 + 4
        torch.add(weight, 1, out=out.resize_(0))
        assert (seen.now, seen.largest) == (2048, 1024)
        del weight
        assert seen.now == 1024


def test_a_backward_pass_is_counted() -> None:
    """exp keeps its result; its backward pass makes the gradient of the sum, a view of one number, and the product."""
    weight = torch.ones(KB, requires_grad=True)
    with LiveTensors() as seen:
        made = weight.exp()
        made.sum().backward()
        assert seen.peak >= 2048
        del made
        assert seen.now == 1024, "its gradient"
        weight.grad = None
        assert seen.now == 0
