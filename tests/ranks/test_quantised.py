"""A float8 checkpoint in the trainer, and its exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncmoe.models import load_hf_config
from tests import float8
from tests.ranks import launch

pytestmark = pytest.mark.ranks

CHANGED = 1.01
LAYOUTS = {1: ["tp=1"], 2: ["tp=2", "pp=2", "ep=2"]}
OTHERS = [pytest.param(*one, marks=pytest.mark.thorough) for one in (("deepseek_v3", 1), ("qwen3_moe", 2))]


@pytest.mark.parametrize(("kind", "ranks"), [("deepseek_v3", 2), *OTHERS])
def test_what_is_exported_is_what_the_checkpoint_stood_for_or_its_like(tmp_path: Path, kind: str, ranks: int) -> None:
    """Weights that a trainer has changed, in its dtype; and bit for bit what SGLang's own code quantises them to."""
    plain, served = float8.plain_model(tmp_path / "origin", kind), tmp_path / "hf"
    before = float8.dequantised_weights(float8.write(plain, served))
    launch.run("quantised", ranks, tmp_path, str(tmp_path), str(CHANGED), *LAYOUTS[ranks])
    hf = load_hf_config(served)
    for layout in LAYOUTS[ranks]:
        found = float8.read(tmp_path / f"{layout}-plain")
        assert found.keys() == before.keys()
        biases = [name for name in found if name.endswith("correction_bias")]  # no parameters, so not changed
        for name, value in found.items():
            torch.testing.assert_close(value, before[name] * (1.0 if name in biases else CHANGED), rtol=1e-6, atol=0)
        wanted, again = float8.quantised_weights(hf, found), float8.read(tmp_path / f"{layout}-float8")
        assert again.keys() == wanted.keys()
        assert [name for name, value in wanted.items() if not float8.same(again[name], value)] == []
        settings = {form: json.loads((tmp_path / f"{layout}-{form}" / "config.json").read_text()) for form in ("plain", "float8")}
        assert "quantization_config" not in settings["plain"]
        assert {one["dtype"] for one in settings.values()} == {"float32"}
        assert settings["float8"]["quantization_config"] == float8.CONFIG
