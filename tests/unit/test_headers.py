"""Checkpoints that do not match config.json: each is refused before a process starts, with all its faults at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.errors import UserError
from asyncmoe.launch.validate import validate
from asyncmoe.models.headers import INDEX, SINGLE
from asyncmoe.models.make import make_model
from tests import families, float8
from tests.configs import minimal

OUT, OTHER = "model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"
HEAD, EMBED, LAST = "lm_head.weight", "model.embed_tokens.weight", "model.layers.2.input_layernorm.weight"


class Folder:
    """A checkpoint that is loaded, changed and rewritten."""

    def __init__(self, path: Path) -> None:
        self.path, self.tensors = path, load_file(path / SINGLE)
        self.hf: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.files: dict[str, str] = {}

    def write(self, shards: int = 1) -> None:
        (self.path / "config.json").write_text(json.dumps(self.hf))
        (self.path / SINGLE).unlink()
        self.files = {name: f"model-{at % shards}.safetensors" if shards > 1 else SINGLE for at, name in enumerate(sorted(self.tensors))}
        for file in set(self.files.values()):
            save_file({name: value.clone() for name, value in self.tensors.items() if self.files[name] == file}, self.path / file)
        if shards > 1:
            self.index()

    def index(self, **changed: str | None) -> None:
        """Write the index, of which something may differ."""
        files = {name: file for name, file in {**self.files, **changed}.items() if file}
        (self.path / INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.fixture
def copied(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folder]:
    """Models are made once per session."""
    root = tmp_path_factory.getbasetemp() / "made-for-headers"

    def one(name: str) -> Folder:
        if name == "made" and not (root / name).exists():
            make_model(root / name, MadeModel(), seed=0)
        elif name in float8.MODELS.keys() - families.MODELS.keys() and not (root / name).exists():
            float8.write(float8.plain_model(root / "plain", name), root / name)
        elif not (root / name).exists():
            families.write(root / name, name)
        return Folder(Path(shutil.copytree(root / name, tmp_path / "model")))

    return one


def config(path: Path) -> Config:
    return minimal(path.parent / "run", path)


Act = Callable[[Folder], object]


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Act:
    return lambda folder: folder.tensors.update({name: change(folder.tensors[name]).contiguous()})


def add(name: str, *shape: int) -> Act:
    return lambda folder: folder.tensors.update({name: torch.zeros(shape)})


def drop(part: str) -> Act:
    return lambda folder: [folder.tensors.pop(name) for name in list(folder.tensors) if part in name]


def renamed(old: str, new: str) -> Act:
    return lambda folder: folder.tensors.update({name.replace(old, new): folder.tensors.pop(name) for name in list(folder.tensors)})


def said(**keys: Any) -> Act:
    return lambda folder: folder.hf.update(keys)


def unsaid(*keys: str) -> Act:
    return lambda folder: [folder.hf.pop(key, None) for key in keys]


def another_layer(folder: Folder) -> None:
    last = {name: value for name, value in folder.tensors.items() if name.startswith("model.layers.2.")}
    folder.tensors |= {name.replace(".2.", ".3.", 1): value for name, value in last.items()}


def fused(folder: Folder) -> None:
    """As transformers 5 holds experts in memory."""
    for name in [name for name in folder.tensors if ".mlp.experts." in name]:
        front, _, part = name.partition(".mlp.experts.")
        folder.tensors[f"{front}.mlp.experts.{'down_proj' if 'down' in part else 'gate_up_proj'}"] = folder.tensors.pop(name)


def written(shards: int, change: Callable[[Folder], object]) -> Act:
    """What happens to the files."""
    return lambda folder: (folder.write(shards), change(folder))


def bytes_of(change: Callable[[bytes], bytes]) -> Act:
    return written(1, lambda folder: (folder.path / SINGLE).write_bytes(change((folder.path / SINGLE).read_bytes())))


def pointing(*names: str) -> Act:
    oid = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    return lambda folder: [(folder.path / name).write_text(oid) for name in names]


def twice(folder: Folder) -> None:
    file = folder.path / next(file for file in folder.files.values() if file != folder.files[OUT])
    save_file({**load_file(file), OUT: folder.tensors[OUT]}, file)


ENDS = "generation_config.json"
NOT_SAID, NO_WHOLE = f"index.json: got {OUT} in another file", "expected a whole safetensors file; download it again"
LIES: dict[str, tuple[str, Act, str]] = {
    "missing": ("llama deepseek", drop(OUT), f"{OUT}: got nothing, expected a tensor, as config.json has it"),
    "a norm of two dimensions": ("glm deepseek", tensor(LAST, lambda x: x[None]), "got shape [1, 64], expected [64]"),
    "doubles": ("llama deepseek", tensor(OUT, torch.Tensor.double), "got dtype F64, expected BF16 or F32 or F16"),
    "packed integers": ("llama qwen3_moe", renamed("o_proj.weight", "o_proj.qweight"), "it looks quantised, but config.json does not"),
    "a value head": ("qwen3 deepseek", add("v_head.weight", 1, 64), "v_head.weight: got a tensor, expected nothing, as config.json"),
    "an adapter inside": ("llama deepseek", add("model.layers.0.self_attn.o_proj.lora_A.default.weight", 4, 64), "merge_and_unload"),
    "fused experts": ("qwen3_moe deepseek", fused, "save it with save_pretrained(..., save_original_format=True)"),
    "a layer more": ("llama qwen3_moe deepseek", another_layer, "model.layers.3.input_layernorm.weight"),
    "tied": ("llama qwen3", said(tie_word_embeddings=True), "lm_head.weight: got a tensor, expected nothing, as config.json has it; set"),
    "float8 said": ("qwen3_moe", said(quantization_config=float8.CONFIG), "dtype F32, expected F8_E4M3, as config.json has a quantization"),
    "no class": ("llama deepseek", unsaid("architectures"), "architectures in config.json: got 'none', expected ['"),
    "an end beyond": ("llama made", lambda one: (one.path / ENDS).write_text('{"eos_token_id": 999}'), f"eos_token_id in {ENDS}: got"),
    "no file": ("llama made", written(1, lambda folder: (folder.path / SINGLE).unlink()), f"got no {SINGLE}, {NO_WHOLE}"),
    "cut short": ("llama made", bytes_of(lambda x: x[:-1]), NO_WHOLE),
    "pickled": ("llama made", written(1, lambda folder: (folder.path / SINGLE).rename(folder.path / "a.bin")), "save_pretrained"),
    "beyond the folder": ("llama made", written(2, lambda folder: folder.index(**{OUT: "../other/model.safetensors"})), "same directory"),
    "another file": ("llama made", written(1, lambda folder: save_file({}, folder.path / "a.safetensors")), "got a.safetensors, "),
    "no shard": ("deepseek made", written(3, lambda folder: (folder.path / folder.files[OUT]).unlink()), f".safetensors, {NO_WHOLE}"),
    "an older single file": ("llama made", written(2, lambda folder: save_file(folder.tensors, folder.path / SINGLE)), f"got {SINGLE}, "),
    "pointers": ("llama made", written(2, pointing("model-0.safetensors", "tokenizer.json")), "model-0.safetensors, tokenizer.json: Git"),
    "a config.json elsewhere": ("llama made", written(1, pointing("config.json")), "got config.json: Git LFS pointers, expected"),
    "not in the index": ("llama made", written(2, lambda folder: folder.index(**{OUT: None})), NOT_SAID),
    "in two shards": ("llama made", written(2, twice), NOT_SAID),
    "in no shard": ("llama made", written(2, lambda folder: folder.index(odd="model-1.safetensors", **{OUT: "model-9"})), "got no model-9"),
    "no index": ("glm made", written(2, lambda folder: (folder.path / INDEX).write_text("[]")), "expected a safetensors index"),
}  # fmt: skip


def refused(folder: Folder) -> list[str]:
    if not folder.files:
        folder.write()
    with pytest.raises(UserError) as caught:
        models.check(config(folder.path), models.load_hf_config(folder.path), weights=folder.path)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("lie", "family"), [(lie, family) for lie, (those, _, _) in LIES.items() for family in those.split()])
def test_a_checkpoint_that_lies_is_refused(copied: Callable[[str], Folder], lie: str, family: str) -> None:
    folder, (_, act, words) = copied(family), LIES[lie]
    act(folder)
    lines = refused(folder)
    assert any(words in line for line in lines), lines


def test_all_faults_are_told_at_once(copied: Callable[[str], Folder]) -> None:
    folder = copied("qwen3_moe")
    odd = said(logit_scale=2, num_experts_per_tok=1, hidden_act="gelu")
    for act in (drop(OUT), add("v_head.weight", 1), odd, tensor(LAST, torch.Tensor.double), written(20, lambda _: None)):
        act(folder)
    (folder.path / folder.files[OTHER]).unlink()
    lines = refused(folder)
    parts = ("logit_scale", "hidden_act", "several", f"no {folder.files[OTHER]}", "v_head.weight", OUT, "dtype F64")
    assert [part for part in parts if not any(part in line for line in lines)] == []
    assert not any(OTHER in line for line in lines), "the file that is absent has it"
    with pytest.raises(UserError) as caught:
        validate(config(folder.path))
    assert str(caught.value).splitlines() == lines


def prediction(folder: Folder) -> None:
    another_layer(folder)
    folder.tensors |= {f"model.layers.3.{name}.weight": torch.ones(2) for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")}


def halves(folder: Folder) -> None:
    wide = ("gate.weight", "e_score_correction_bias")
    folder.tensors = {name: value if name.endswith(wide) else value.bfloat16() for name, value in folder.tensors.items()}


def tied_twice(folder: Folder) -> None:
    folder.hf["tie_word_embeddings"] = True
    folder.tensors[HEAD] = folder.tensors[EMBED]


ALL = " ".join(families.MODELS)
NOTES = {"_name_or_path": "a", "unsloth_version": "1", "unk_token_id": 3, "id2label": {"0": "a"}, "temperature": 0.6, "odd": None}
HEALTHY: dict[str, tuple[str, Act]] = {
    "as written": (f"{ALL} made deepseek_v3", said(**NOTES)),
    "with frequencies": (ALL, add("model.layers.0.self_attn.rotary_emb.inv_freq", 4)),
    "with layers of prediction": ("glm deepseek", prediction),
    "tied and written twice": ("llama qwen3", tied_twice),
    "in bfloat16": (ALL, halves),
    "without defaults": (ALL, unsaid("hidden_act", "attention_dropout", "tie_word_embeddings", "rope_theta", "initializer_range")),
    "of transformers 4": ("qwen3 mixtral", said(rope_theta=1e4, rope_scaling=None, rope_parameters=None)),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "family"), [(kind, family) for kind, (those, _) in HEALTHY.items() for family in those.split()])
def test_healthy_checkpoints_pass(copied: Callable[[str], Folder], kind: str, family: str) -> None:
    folder = copied(family)
    HEALTHY[kind][1](folder)
    folder.write(2)
    models.check(config(folder.path), models.load_hf_config(folder.path), weights=folder.path)


@pytest.mark.parametrize("family", families.MODELS)
def test_no_value_of_a_key_is_an_error_of_ours(copied: Callable[[str], Folder], family: str) -> None:
    folder, unnamed, values = copied(family), [], [True, "8", 8.5, 64.0, -1, 0, 1 << 70, [], {}, "x", [1], float("nan")]
    folder.write()
    for key in sorted(models.load_hf_config(folder.path).keys() | {"quantization_config", "torch_dtype", "num_experts"}):
        for value in values:
            try:
                models.check(config(folder.path), {**models.load_hf_config(folder.path), key: value}, weights=folder.path)
            except UserError as error:
                unnamed += [] if key in str(error) or "config.json has it" in str(error) else [(key, value)]
    assert unnamed == []
