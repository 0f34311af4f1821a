"""Checkpoints that several ranks of plain Megatron have saved hold the weights of the one that a single rank saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncmoe.models.importing.command import import_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

MODELS = ("dense", "moe", "mla")
LAYOUTS = {"tp2 pp2 ep2": (4, 2, 2, 2, 1), "pp4": (4, 1, 4, 1, 1), "tp2 ep2 etp2": (4, 2, 1, 2, 2), "tp2": (2, 2, 1, 1, 2)}
"""Ranks, and the sizes TP, PP, EP, ETP."""


def megatron(*words: str, ranks: int = 0) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "tests.plain_megatron", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=400)
    if done.returncode:
        pytest.fail(done.stdout[-2000:] + done.stderr[-4000:], pytrace=False)


def tensors(folder: Path, model: str, origin: Path, out: Path) -> dict[str, torch.Tensor]:
    import_checkpoint(folder / model / "megatron", out, origin / model / "hf")
    return load_file(out / "model.safetensors")


def test_every_layout_is_imported_alike(tmp_path: Path) -> None:
    origin = tmp_path / "one"
    megatron(str(origin), *MODELS)
    wanted = {model: tensors(origin, model, origin, tmp_path / f"out-{model}") for model in MODELS}
    for layout, (ranks, *sizes) in LAYOUTS.items():
        models = [model for model in MODELS if model != "dense" or sizes[2] == 1]
        megatron(str(tmp_path / layout), *models, "--from", str(origin), "--sizes", *map(str, sizes), ranks=ranks)
        for model in models:
            got = tensors(tmp_path / layout, model, origin, tmp_path / f"out-{model}-{layout}")
            assert got.keys() == wanted[model].keys()
            assert all(torch.equal(value, wanted[model][name]) for name, value in got.items()), (model, layout)
