"""An engine with other weights than the trainer samples nothing: the run ends and names the parameters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.system.runs import ENGINES, ONE_RANK, demo, engine_python, provide, refused

pytestmark = pytest.mark.system
HOW = [("sync.verify_every=1",), *(pytest.param(one, marks=pytest.mark.thorough) for one in (("train=lora",), ("sync.method=disk",)))]


def other_weights(folder: Path, model: Path) -> str:
    """A Python whose engines load a copy of the model of which one expert differs in one element: the override that names it."""
    shutil.copytree(model, folder / "other")
    (file,) = (folder / "other").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] += 2.0**-6
    file.chmod(0o644)
    save_file(tensors, file, {"format": "pt"})
    swapped = f'$(echo "$*" | sed "s#--model-path {model}#--model-path {folder}/other#")'
    return engine_python(folder, f'case "$*" in *platform.sglang*) exec {ENGINES} {swapped};; esac')


@pytest.mark.parametrize("how", HOW, ids=" ".join)
def test_an_element_that_differs_ends_the_run_before_it_samples(tmp_path: Path, how: tuple[str, ...]) -> None:
    model, directory = provide(tmp_path / "model"), tmp_path / "run"
    line = refused(*demo(directory, *ONE_RANK, "warmup.steps=0", other_weights(tmp_path, model), *how))
    assert "engine.0 has loaded other weights from the model's files than the trainer: checksums differ: " in line
    assert line.endswith("model.layers.1.mlp.experts.w13_weight of rank 0")
    assert '"generated_tokens":0,' in (directory / "rollout.jsonl").read_text().splitlines()[-1]
