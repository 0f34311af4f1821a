"""torch's fused Adam in the place of its loop over parameters."""

from __future__ import annotations

import copy

import torch

from asyncmoe.platform.megatron.adam import fuse


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size)) for size in (7, 3, 5)]


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_it_goes_on_as_the_other_would_after_a_checkpoint_of_it() -> None:
    plain = torch.optim.AdamW(parameters(), lr=1e-2, weight_decay=0.1)
    step(plain, 1)
    saved = copy.deepcopy(plain.state_dict())
    step(plain, 2)

    fused = torch.optim.AdamW(parameters(), lr=1e-2, weight_decay=0.1)
    fuse([fused])
    step(fused, 1)
    fused.load_state_dict(saved)
    assert not fused.param_groups[0]["fused"], "a checkpoint says how it was there"
    fuse([fused])
    step(fused, 2)
    for one, other in zip(plain.param_groups[0]["params"], fused.param_groups[0]["params"], strict=True):
        assert torch.allclose(one, other, atol=1e-7)
        assert float(fused.state[other]["step"]) == 2


def test_others_are_left_as_they_are() -> None:
    other = torch.optim.SGD(parameters(), lr=0.1)
    fuse([other])
    assert "fused" not in other.param_groups[0] or not other.param_groups[0]["fused"]
