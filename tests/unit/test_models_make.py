"""The made model, loaded with transformers' public API."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncmoe.config.model import MadeModel, ModelSection
from asyncmoe.errors import ConfigError
from asyncmoe.models.make import VOCAB, make_model, to_make

SHAPE = MadeModel(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, experts=4, experts_per_token=2, expert_hidden=16, context=512)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "deep" / "model"
    make_model(out, SHAPE, seed=3)
    return out


@pytest.fixture(scope="module")
def tokenizer(made: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(made)


@pytest.mark.parametrize("text", ["12+7=", "  spaces\n\tand tabs ", "ünï ÷ 日本語 🙂", "#### 42", "".join(map(chr, range(1, 256)))])
def test_any_text_survives(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id not in tokens
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text


def test_tokenizer_has_the_models_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCAB
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 1, 2, 3]
    assert all(isinstance(tokenizer.decode([token]), str) for token in range(VOCAB))


def test_equal_seeds_give_equal_weights(made: Path, tmp_path: Path) -> None:
    found = []
    for name, seed in (("same", 3), ("other", 4)):
        make_model(tmp_path / name, SHAPE, seed)
        found.append((tmp_path / name / "model.safetensors").read_bytes())
    assert found[0] == (made / "model.safetensors").read_bytes() != found[1]


def test_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    make_model(tmp_path / "model", SHAPE, seed=3)
    assert torch.equal(torch.rand(1), expected)


def test_nothing_is_left_behind_by_a_shape_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        make_model(tmp_path / "model", SHAPE.model_copy(update={"experts_per_token": 9}), seed=0)
    assert list(tmp_path.iterdir()) == []


def test_a_run_makes_models_in_its_own_places_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "elsewhere" / "run"

    def asked(path: str | Path, made: MadeModel | None = SHAPE) -> bool:
        return to_make(ModelSection(path=Path(path), make=made), run)

    (tmp_path / "mine").mkdir()
    assert not asked("mine")
    assert not asked("typo", made=None)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "models").symlink_to(tmp_path / "large-disk")
    assert all(map(asked, ("runs/models/tiny", tmp_path / "runs/models/deep/tiny", run / "model")))
    for wrong in ("Qwen/Qwen3-0.6B", "runs/demo-hf", "runs/models/../../x", run.parent / "model", "runs/modelsx/a"):
        with pytest.raises(ConfigError, match=re.escape(f"model.path: got {wrong}, ")):
            asked(wrong)
