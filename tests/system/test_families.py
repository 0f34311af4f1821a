"""Short whole runs of every family: a real trainer, a real engine, and at every step the two agree on every token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncmoe.models import family_of, load_hf_config
from tests import families
from tests.system.runs import AGREES, ONE_RANK, Command, metrics, run

pytestmark = [pytest.mark.system, pytest.mark.thorough]


@pytest.mark.parametrize("family", families.MODELS)
def test_a_family_learns_from_an_engine_of_its_own(family: str, tmp_path: Path) -> None:
    """The path of a checkpoint in between, and the biases that routers choose by moved by their own rule, where there are some."""
    families.write(tmp_path / "model", family)
    hf = load_hf_config(tmp_path / "model")
    rate = 1e-3 if family_of(hf).shape_of(hf).router_bias else 0.0
    summary = run(
        tmp_path / "run",
        *("warmup.steps=2", "warmup.lr=1e-3", "run.steps=4", *ONE_RANK, "trainer.checkpoint_every=3"),
        *(f"trainer.router_bias_rate={rate}", "sync.verify_every=1", AGREES),
    )
    assert summary["steps"] == 4
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    differ = [step["routing_mismatch"] for step in metrics(tmp_path / "run") if step["phase"] == "rl"]
    routed = bool(family_of(hf).shape_of(hf).experts)
    assert all(max(shares.values()) < 0.5 if routed else shares is None for shares in differ)
    resumed = run(tmp_path / "run", "warmup.steps=2", "run.steps=5", *ONE_RANK, f"trainer.router_bias_rate={rate}")
    assert resumed["steps"] == 5


CONFIGURATION = """
from transformers import DeepseekV3Config

class KimiConfig(DeepseekV3Config):
    model_type = "kimi_k2"
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizerFast

class KimiTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_a_checkpoint_with_python_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kimi-K2 is published: transformers knows neither its model_type nor its tokenizer, the Python beside it does."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    model = families.write(tmp_path / "model", "deepseek")
    (model / "configuration_kimi.py").write_text(CONFIGURATION)
    (model / "tokenization_kimi.py").write_text(TOKENIZATION)
    changes = {
        "config.json": {
            "model_type": "kimi_k2",
            "n_group": 1,
            "topk_group": 1,
            "auto_map": {"AutoConfig": "configuration_kimi.KimiConfig"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "KimiTokenizer",
            "auto_map": {"AutoTokenizer": [None, "tokenization_kimi.KimiTokenizer"]},
        },
    }
    for name, change in changes.items():
        said = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**said, **change}))
    summary = run(
        tmp_path / "run",
        *("warmup.steps=2", "warmup.lr=1e-3", "run.steps=2", *ONE_RANK, "trainer.checkpoint_every=2"),
        "model.trust_remote_code=true",
        *("sync.verify_every=1", AGREES),
    )
    assert summary["steps"] == 2
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    (tmp_path / "exported.log").write_text("the user's")
    Command("export", str(tmp_path / "run"), str(tmp_path / "exported")).succeed()
    assert (tmp_path / "exported.log").exists()
    assert "step 4 of the run run" in (tmp_path / "exported" / "README.md").read_text()
    for kept in ("configuration_kimi.py", "tokenization_kimi.py", "tokenizer_config.json"):
        assert (tmp_path / "exported" / kept).read_bytes() == (model / kept).read_bytes()
    was, exported = (json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "exported"))
    assert {key: exported[key] for key in was} == {**was, "dtype": "float32"}


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_layers_of_multi_token_prediction_can_be_left_out(family: str, tmp_path: Path) -> None:
    """Published checkpoints have one after the last layer. Without it in config.json, neither the trainer nor the engine takes that layer
    for one of the model's, and the export is without it."""
    model = families.write(tmp_path / "model", family)
    weights = load_file(model / "model.safetensors")
    hf = load_hf_config(model)
    last, hidden = hf["num_hidden_layers"] - 1, hf["hidden_size"]
    more = {name.replace(f".{last}.", f".{last + 1}."): value + 1 for name, value in weights.items() if f"layers.{last}." in name}
    here = f"model.layers.{last + 1}"
    more |= {f"{here}.{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    more |= {f"{here}.eh_proj.weight": torch.ones(hidden, 2 * hidden)}
    more |= {f"{here}.{name}.weight": weights["model.embed_tokens.weight"] + 1 for name in ("embed_tokens", "shared_head.head")}
    save_file({**weights, **more}, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps({**hf, "num_nextn_predict_layers": 0}))
    summary = run(
        tmp_path / "run",
        *("warmup.steps=0", "run.steps=2", *ONE_RANK, "trainer.checkpoint_every=2", "sync.verify_every=1"),
        AGREES,
    )
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    Command("export", str(tmp_path / "run"), str(tmp_path / "exported")).succeed()
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == weights.keys()
