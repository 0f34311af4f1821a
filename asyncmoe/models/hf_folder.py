"""The directory of a Hugging Face model, besides its weights: what belongs to it, and the configuration that describes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncmoe import storage

CONFIG = "config.json"
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")
"""Files of which a tokenizer of transformers has at least one."""
_TOKENIZER = (*_VOCABULARIES, "tokenizer*", "*.vocab", "merges.txt", "bpe.codes", "added_tokens.json", "special_tokens_map.json")
_TEXTS = (*_TOKENIZER, "chat_template*", "additional_chat_templates/*", "generation_config.json", "*processor_config.json", "*.py")
"""What belongs to a model besides config.json and weights, whatever the weights: tokenizer, chat templates, code."""


def texts(model: Path, patterns: Sequence[str] = (CONFIG, *_TEXTS)) -> list[Path]:
    """Return the files of a model besides its weights that make it what it is, sorted; their paths begin with `model`."""
    return sorted({path for pattern in patterns for path in model.glob(pattern) if path.is_file()})


def copy_texts(model: Path, folder: Path) -> None:
    """Copy tokenizer, chat templates and licence. Nothing else: other weights, model cards and results are of the old ones."""
    for path in texts(model, (*_TEXTS, "LICEN[CS]E*", "NOTICE*", "USE_POLICY*")):
        copy = folder / path.relative_to(model)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def write_config(folder: Path, hf: Mapping[str, Any], dtype: str) -> None:
    """Write the config.json of weights of this dtype, beside them. transformers 5 calls it `dtype`, transformers 4 `torch_dtype`."""
    values = {**hf, "dtype": dtype} | ({"torch_dtype": dtype} if "torch_dtype" in hf else {})
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    storage.share(folder, CONFIG)


def has_tokenizer(model: Path) -> bool:
    """Return whether a directory has a tokenizer's vocabulary."""
    return any(any(model.glob(pattern)) for pattern in _VOCABULARIES)
