"""The files of a Hugging Face model besides its weights: configuration, tokenizer, chat templates, code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncmoe import storage
from asyncmoe.errors import DataError

CONFIG = "config.json"
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")
"""Vocabulary files; every tokenizer of transformers has at least one."""
_TOKENIZER = (*_VOCABULARIES, "tokenizer*", "*.vocab", "merges.txt", "bpe.codes", "added_tokens.json", "special_tokens_map.json")
_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1024
"""The beginning of a Git LFS pointer, and an upper bound of its size (git-lfs, docs/spec.md)."""
_TEXTS = (*_TOKENIZER, "chat_template*", "additional_chat_templates/*", "generation_config.json", "*processor_config.json", "*.py")
"""A model's files besides config.json and weights: tokenizer, chat templates, code."""


def texts(model: Path, patterns: Sequence[str] = (CONFIG, *_TEXTS)) -> list[Path]:
    """Return the files besides the weights that define a model, sorted; their paths begin with `model`."""
    return sorted({path for pattern in patterns for path in model.glob(pattern) if path.is_file()})


def copy_texts(model: Path, folder: Path) -> None:
    """Copy tokenizer, chat templates and licence, but not weights, model cards or results, which are the old model's."""
    for path in texts(model, (*_TEXTS, "LICEN[CS]E*", "NOTICE*", "USE_POLICY*")):
        copy = folder / path.relative_to(model)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def write_config(folder: Path, hf: Mapping[str, Any], dtype: str) -> None:
    """Write the config.json for weights of this dtype. transformers 5 names the key `dtype`, transformers 4 `torch_dtype`."""
    values = {**hf, "dtype": dtype} | ({"torch_dtype": dtype} if "torch_dtype" in hf else {})
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    storage.share(folder, CONFIG)


def pointers(model: Path) -> list[DataError]:
    """Return an error that names the model files that are Git LFS pointers; [] if there are none."""
    small = [path for path in texts(model, (CONFIG, *_TEXTS, "*.safetensors*")) if path.stat().st_size < _POINTER_BYTES]
    named = ", ".join(path.relative_to(model).as_posix() for path in small if path.read_bytes().startswith(_POINTER))
    told = DataError(str(model), got=f"{named:.300}: Git LFS pointers", expected="the files themselves", hint="run `git lfs pull` there")
    return [told] if named else []


def tokenizer_settings(model: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, or {} if there is none; transformers then looks elsewhere."""
    settings = _json(model / "tokenizer_config.json")
    return settings if isinstance(settings, dict) else {}


def tokenizer_faults(model: Path) -> list[DataError]:
    """Return an error if a directory has no tokenizer, or an incomplete one. A tokenizer needs a vocabulary, without which transformers
    makes some tokenizers empty, or code that builds one."""
    broken = ", ".join(path.name for path in texts(model, ("tokenizer*.json",)) if _json(path) is None)
    if not broken and (texts(model, _VOCABULARIES) or "auto_map" in tokenizer_settings(model)):
        return []
    fetch = f"fetch the model's own tokenizer: hf download ORG/NAME --exclude '*.safetensors' --local-dir {model}"
    got = f"{broken}, incomplete" if broken else "no vocabulary"
    return [DataError("model.path", got=got, expected=f"a tokenizer in {model}", hint=fetch)]


def _json(file: Path) -> Any:
    """Return the contents of a file; None if it cannot be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
