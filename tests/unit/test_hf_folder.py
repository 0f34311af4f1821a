"""Exported directories describe themselves, and other users may read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models import hf_folder, load_hf_config
from asyncmoe.models.lora import peft
from asyncmoe.models.make import make_model
from tests.unit.adapters import random_adapter, shape
from tests.unit.test_adapters_peft import ALL

OLD = ("tf_model.h5", "pytorch_model.bin", "flax_model.msgpack", "m.gguf", "model.safetensors.index.json", "README.md", "all_results.json")
KEPT = ("LICENSE", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json", "modeling_own.py")


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_that_the_umask_says(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        make_model(tmp_path / "new" / "model", MadeModel(layers=1, experts=2), seed=0)
        peft.write(tmp_path / "new", peft.to_peft(shape(), random_adapter(shape(), ALL, 0), "base"))
    finally:
        os.umask(before)
    found = {path.name: (stat.S_IMODE(path.stat().st_mode), path.is_dir()) for path in (tmp_path / "new").rglob("*")}
    assert {"model.safetensors", peft.MODEL} <= found.keys()
    assert {name: mode for name, (mode, folder) in found.items() if mode != (0o777 if folder else 0o666) & ~mask} == {}


def test_a_folder_has_what_belongs_to_its_weights_and_says_their_dtype(tmp_path: Path) -> None:
    make_model(tmp_path / "model", MadeModel(layers=1, experts=2), seed=0)
    for name in (*OLD, *KEPT):
        (tmp_path / "model" / name).touch()
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool.jinja").touch()
    (tmp_path / "out").mkdir()
    hf_folder.copy_texts(tmp_path / "model", tmp_path / "out")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {*KEPT, "additional_chat_templates/tool.jinja", "tokenizer_config.json"}
    for former in ("dtype", "torch_dtype"):
        hf = {key: value for key, value in load_hf_config(tmp_path / "model").items() if key != "dtype"}
        hf_folder.write_config(tmp_path / "out", {**hf, former: "bfloat16"}, "float32")
        assert {load_hf_config(tmp_path / "out").get(key, "float32") for key in ("dtype", "torch_dtype")} == {"float32"}
