"""Mixtures that start as a dense model: transformers computes the same with both, and what cannot be the same is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncmoe.cli import app
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.models import family_of, load_hf_config
from asyncmoe.models.upcycling.distil import Distillation
from asyncmoe.models.upcycling.fresh import Fresh
from asyncmoe.models.upcycling.mixture import Upcycling, kind_named, settings
from asyncmoe.models.upcycling.write import shards_of, upcycle
from tests import families

SMALL = Distillation(steps=30, batch=8, tokens=32, lr=1e-3, held_out=8)


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    return found


@pytest.mark.parametrize(
    ("name", "wanted", "kind"),
    [
        ("llama", Upcycling(4, 2), "mixtral"),
        ("llama", Upcycling(3, 1, seed=7), "mixtral"),
        ("qwen3", Upcycling(4, 4), "qwen3_moe"),
        ("llama", Upcycling(8, 2, shared=1), "glm4_moe"),
        ("qwen3", Upcycling(4, 3, shared=3), "glm4_moe"),
        ("qwen3", Upcycling(2, 2, kind="qwen3_moe"), "qwen3_moe"),
    ],
)
def test_a_mixture_computes_what_the_dense_model_does(tmp_path: Path, name: str, wanted: Upcycling, kind: str) -> None:
    first = families.write_dense(tmp_path / "dense", name)
    assert upcycle(first, tmp_path / "mixture", wanted) is None
    hf = load_hf_config(tmp_path / "mixture")
    assert hf["model_type"] == kind
    assert family_of(hf).routing(hf) is not None
    ids = torch.randint(0, hf["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(3))
    wide = logits(first, ids)
    assert torch.allclose(logits(tmp_path / "mixture", ids), wide, atol=1e-5 * float(wide.abs().max()), rtol=0)
    kept = {path.name for path in first.iterdir() if "safetensors" not in path.name}
    assert {path.name for path in (tmp_path / "mixture").iterdir()} == kept | {"model.safetensors"}


def test_a_tied_model_gets_an_output_layer_of_its_own(tmp_path: Path) -> None:
    first = families.write_dense(tmp_path / "dense", "llama", tie_word_embeddings=True)
    held = load_file(first / "model.safetensors")
    del held["lm_head.weight"]
    save_file(held, first / "model.safetensors", {"format": "pt"})
    upcycle(first, tmp_path / "mixture", Upcycling(2, 1))
    ids = torch.arange(30)[None]
    assert torch.allclose(logits(tmp_path / "mixture", ids), logits(first, ids), atol=1e-5)


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    first = families.write_dense(tmp_path / "dense", "llama")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        upcycle(first, tmp_path / name, Upcycling(4, 2, seed=seed), share=0.1)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_experts_that_differ_learn_to_say_what_the_dense_model_says(tmp_path: Path) -> None:
    first, said = families.write_dense(tmp_path / "dense", "qwen3"), list[str]()
    found = upcycle(first, tmp_path / "mixture", Upcycling(4, 2), share=0.3, how=SMALL, say=said.append)
    assert found is not None
    assert found.kl_after < 0.8 * found.kl_before
    assert found.difference > 0.1
    assert said[-1].startswith("step 30 of 30: KL ")
    hf = load_hf_config(tmp_path / "mixture")
    stored = {name for name in json.loads(_header(tmp_path / "mixture" / "model.safetensors")) if name != "__metadata__"}
    assert stored == set(family_of(hf).hf_layout(hf, "float32").storages), "transformers writes the names that the family reads"


def _header(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


def test_new_neurons_are_the_same_in_all_three_matrices_and_drawn_like_the_old_ones() -> None:
    fresh, drawn = Fresh(0.25, seed=5), torch.Generator().manual_seed(0)
    gate = torch.randn(64, 400, generator=drawn) * 0.3 + 0.1
    neurons = fresh.neurons(2, 1, 64)
    assert len(neurons) == 16
    assert not np.array_equal(neurons, fresh.neurons(2, 0, 64))
    for part, tensor, along in (("gate", gate, 0), ("up", gate, 0), ("down", gate.T, 1)):
        new = fresh.drawn(tensor, 2, 1, part)
        changed = (new != tensor).any(1 - along).nonzero().flatten()
        assert changed.tolist() == neurons.tolist()
        assert abs(float(new.index_select(along, changed).std()) - 0.3) < 0.01
        assert abs(float(new.index_select(along, changed).mean()) - 0.1) < 0.01
    assert not torch.equal(fresh.drawn(gate, 2, 1, "gate"), fresh.drawn(gate, 2, 1, "up"))


def test_large_checkpoints_are_split() -> None:
    shapes = {"a": (10,), "b": (10,), "c": (30,), "d": (5,)}
    assert shards_of(shapes, itemsize=2, limit=40) == [["a", "b"], ["c"], ["d"]]
    assert shards_of(shapes, itemsize=2, limit=1 << 20) == [list(shapes)]


@pytest.mark.parametrize(
    ("name", "changes", "wanted", "line"),
    [
        ("llama", {}, Upcycling(4, 5), "--top-k: got 5, expected 1 to --experts = 4"),
        ("llama", {}, Upcycling(4, 2, shared=2), "--shared: got 2, expected a count so that count \\+ 1 divides intermediate_size = 128"),
        ("llama", {}, Upcycling(4, 2, kind="qwen3_moe"), "--kind: got qwen3_moe, .*q_norm.*, expected .*leave --kind out"),
        ("llama", {}, Upcycling(4, 2, shared=1, kind="mixtral"), "--kind: got mixtral, .*no shared experts, expected .*1 shared"),
        ("qwen3", {}, Upcycling(4, 2, kind="mixtral"), "--kind: got mixtral, whose attention has k, o, q, v"),
        ("llama", {"head_dim": 16}, Upcycling(4, 2), "head_dim in config.json: got 16, expected 8"),
        (
            "llama",
            {"rope_parameters": families.MODELS["llama"]["rope_parameters"]},
            Upcycling(4, 2),
            "rope_type in config.json: got 'llama3'",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            Upcycling(4, 2),
            "quantization_config in config.json: got a quantised model",
        ),
        ("mixtral", {}, Upcycling(4, 2), "model_type in config.json: got mixtral, a mixture of 8 experts, expected a dense model"),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, Upcycling(4, 2), "a mixture of 1 expert, expected a dense model"),
        ("llama", {"model_type": "gpt2"}, Upcycling(4, 2), "model_type in config.json: got 'gpt2', expected llama or qwen3, a dense model"),
        ("llama", {}, Upcycling(4, 2, kind="glm4_moe"), "--kind: got glm4_moe without --shared, expected --shared 1 or more"),
        ("llama", {}, Upcycling(4, 2, shared=1, kind="mixtral"), "and 1 shared expert; leave --kind out"),
    ],
)
def test_what_cannot_be_the_same_is_refused(name: str, changes: dict[str, Any], wanted: Upcycling, line: str) -> None:
    hf = {**families.sized(families.ENGINE, name), **({"rope_parameters": families.PLAIN} if name == "llama" else {}), **changes}
    with pytest.raises(ConfigError, match=line):
        settings(hf, wanted)


def test_bad_places_and_kinds_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    first = families.write_dense(tmp_path / "dense", "llama")
    with pytest.raises(UserError, match="--kind: got gpt, expected auto, mixtral"):
        kind_named("gpt")
    with pytest.raises(DataError, match="got an existing path"):
        upcycle(first, first, Upcycling(2, 1))
    with pytest.raises(DataError, match="no such directory"):
        upcycle(tmp_path / "none", tmp_path / "out", Upcycling(2, 1))
    (first / "model.safetensors").unlink()
    with pytest.raises(DataError, match="got no safetensors"):
        upcycle(first, tmp_path / "out", Upcycling(2, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = families.write_dense(tmp_path / "dense", "llama")
    words = ["upcycle", str(first), str(tmp_path / "out"), "--experts", "2", "--top-k", "1"]
    app([*words, "--diversify", "0.5", "--steps", "1", "--batch", "1", "--tokens", "8"], standalone_mode=False)
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"{tmp_path / 'out'}: mixtral, 2 experts in each layer, 1 of them for a token"
    assert f"KL to {first} on held-out text: " in out
    assert "mean relative difference between two experts' outputs: " in out
    assert "step 1 of 1" in err
    with pytest.raises(UserError, match="--steps: got 5 without --diversify, expected both, or neither"):
        app(["upcycle", str(first), str(tmp_path / "other"), *words[3:], "--steps", "5"], standalone_mode=False)
    assert not (tmp_path / "other").exists()


def test_a_small_width_is_distilled_too(tmp_path: Path) -> None:
    """A step that leads nowhere is refused, and leaves nothing."""
    first, few = families.write_dense(tmp_path / "dense", "qwen3"), Distillation(steps=2, batch=1, tokens=8, held_out=2)
    assert upcycle(first, tmp_path / "odd", Upcycling(3, 2, shared=31), share=1.0, how=few, say=lambda _: None) is not None
    with pytest.raises(UserError, match=r"the distillation: got a KL divergence of (nan|inf).*; nothing was written: lower --lr = 1e\+30"):
        upcycle(first, tmp_path / "far", Upcycling(2, 1), share=0.1, how=replace(few, lr=1e30), say=lambda _: None)
    with pytest.raises(ConfigError, match=r"--diversify: got 0\.001, less than half a neuron of 128, expected at least 0\.0078"):
        upcycle(first, tmp_path / "none", Upcycling(2, 1), share=0.001)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "odd"]
    assert len({path.stat().st_mode for path in (tmp_path / "odd").iterdir()}) == 1
