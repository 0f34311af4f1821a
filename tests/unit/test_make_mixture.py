"""The mixture of `examples/real/make_mixture.py`: transformers computes the same with it as with the dense model."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncmoe.errors import DataError
from tests import families

MAKE = run_path(str(Path(__file__).parents[2] / "examples" / "real" / "make_mixture.py"))["make"]


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.arange(60).view(2, 30)).logits
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_equal_experts_compute_what_the_dense_model_does_and_new_neurons_make_them_differ(tmp_path: Path, tied: bool) -> None:
    dense = families.write_dense(tmp_path / "dense", "llama", tie_word_embeddings=tied)
    if tied:
        held = load_file(dense / "model.safetensors")
        del held["lm_head.weight"]
        save_file(held, dense / "model.safetensors", {"format": "pt"})
    MAKE(dense, tmp_path / "equal", fresh=0.0)
    wanted = logits(dense)
    assert torch.allclose(logits(tmp_path / "equal"), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)
    MAKE(dense, tmp_path / "fresh", fresh=0.25)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("equal", "fresh"))
    for part, along in (("w1", 1), ("w2", 0), ("w3", 1)):
        name = f"model.layers.1.block_sparse_moe.experts.2.{part}.weight"
        assert (one[name] != other[name]).any(along).sum() == one[name].shape[1 - along] // 4
    with pytest.raises(DataError, match="got an existing path"):
        MAKE(dense, tmp_path / "fresh")
