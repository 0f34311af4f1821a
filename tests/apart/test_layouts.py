"""What all ranks have in common of an optimizer's state, put as another layout has it (real ones: tests/ranks/test_any_layout.py); and a
checkpoint that lacks a part of the state."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncmoe.errors import DataError
from asyncmoe.platform.megatron import any_layout
from asyncmoe.trainer.model import checkpoint, mesh, optimizer
from tests.saving import built, save, small


def group(expert: bool, decay: float, **more: Any) -> dict[str, Any]:
    return {"wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": expert, "is_decoupled_lr": False, "lr": 0.5, **more}


ADAM = SimpleNamespace(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
OTHER = SimpleNamespace(optimizer=object())
TWO = {
    0: {"optimizer": {"param_groups": [group(False, 1.0, step=7.0), group(False, 0.0, step=7.0)]}},
    1: {"optimizer": {"param_groups": [group(True, 1.0, step=7.0)]}},
}
"""As saved with expert parallelism, sharded."""
ONE = {"state": {"common_step": torch.tensor(7.0)}, "param_groups": [group(False, 1.0, step=3.0), group(False, 0.0)]}
"""As saved without, and not sharded."""


def test_an_optimizer_that_counts_in_its_groups() -> None:
    """As Transformer Engine's does, sharded or not; it has counted nothing before its first step."""
    made = any_layout.translated(ONE, {"state": {}, "param_groups": [group(False, 1.0)]}, [OTHER])
    assert made["param_groups"][0]["step"] == 7
    fresh = any_layout.translated({"param_groups": [group(False, 1.0)]}, {"param_groups": [group(True, 1.0)]}, [OTHER])
    assert fresh["param_groups"] == [group(True, 1.0)]


def test_a_group_that_nothing_is_known_of() -> None:
    with pytest.raises(any_layout.Missing, match=r"group of parameters with wd_mult 0\.5"):
        any_layout.translated(TWO, {"param_groups": [group(False, 0.5)]}, [ADAM])


def test_a_checkpoint_without_a_part_of_the_state_is_one_line(tmp_path: Path) -> None:
    config = small(tmp_path, optimizer={"distributed": True})
    try:
        model = built(config)
        saved = save(config, 1, model, optimizer.build(config, model))
        found = pickle.loads((saved / ".metadata").read_bytes())  # noqa: S301  our own
        name = next(name for name in found.state_dict_metadata if "exp_avg_sq" in name)
        del found.state_dict_metadata[name]
        (saved / ".metadata").write_bytes(pickle.dumps(found))
        with pytest.raises(DataError) as refused:
            checkpoint.load(saved, config, model, optimizer.build(config, model))
    finally:
        mesh.stop()
    expected = "the optimizer's state of the model that the run trains; choose another run.dir"
    assert str(refused.value) == f"{saved}: got no {name}, expected {expected}"
