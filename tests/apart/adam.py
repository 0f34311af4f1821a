"""The optimizer: torch's fused Adam in the place of its loop over parameters, and whether its state is sharded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from asyncmoe import checkpoints
from asyncmoe.platform.megatron.adam import fuse
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model import mesh  # noqa: F401  mesh prepares the platform
from tests.ranks import case


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


@pytest.mark.parametrize(
    ("said", "ranks", "saved", "wanted"),
    [
        (None, 1, None, False),
        (None, 2, None, True),
        (None, 2, False, False),
        (None, 1, True, True),
        (True, 1, False, True),
        (False, 2, True, False),
    ],
)
def test_the_kind_of_optimizer(said: bool | None, ranks: int, saved: bool | None, wanted: bool, tmp_path: Path) -> None:
    """As configured; else as the checkpoint has it that a run goes on from; else by the data-parallel ranks."""
    config = case.config(tmp_path, ranks=ranks, optimizer={"distributed": said})
    checkpoint = None
    if saved is not None:
        checkpoints.start(tmp_path, 3)
        checkpoints.finish(tmp_path, 3, {"step": 3, "distributed_optimizer": saved}, 1)
        checkpoint = checkpoints.newest(tmp_path)
    assert state.as_saved(config, checkpoint).trainer.distributed_optimizer == wanted
    assert state.as_saved(config, checkpoint).trainer.model_copy(update={"optimizer": config.trainer.optimizer}) == config.trainer
