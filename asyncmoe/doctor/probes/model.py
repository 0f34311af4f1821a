"""The model of a configuration: its config.json, its family, and the completeness of its files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.doctor.facts import ModelFacts
from asyncmoe.errors import UserError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_LONGEST_HEADER = 100 << 20
"""The longest header that safetensors accepts, in bytes."""


def look(config: Config) -> ModelFacts:
    """Return the facts that are available without reading the weights.

    Raises:
        ImportError: asyncmoe's extension, which layouts need, is missing.
    """
    from asyncmoe import models
    from asyncmoe.models.payload import Payload
    from asyncmoe.reshard.layout import ITEM_BYTES

    path = config.model.path
    if config.model.make is not None and not path.exists():
        return ModelFacts(str(path), to_make=True)
    try:
        hf = models.hf_config_of(config)
        models.check(config, hf)
    except UserError as error:
        return ModelFacts(str(path), trouble=str(error))
    weights = _elements(Payload(hf).tensors().values())
    adapter = config.adapter and _elements(Payload(hf, models.adapter_of(config, hf)).tensors().values())
    return ModelFacts(
        path=str(path),
        family=str(hf["model_type"]),
        parameters=adapter or weights,
        weights_bytes=weights * ITEM_BYTES.get(models.engine_dtype(hf, config.engines), 2),
        trouble=next(broken(path), None),
    )


def broken(path: Path) -> Iterator[str]:
    """Yield the missing and truncated files of a model directory."""
    if not any((path / name).is_file() for name in _TOKENIZERS):
        yield f"{path}: no tokenizer.json"
    files = [_SINGLE]
    if (path / _INDEX).is_file():
        try:
            files = sorted(set(json.loads((path / _INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{path / _INDEX} is no index of safetensors: {error}"
            return
    for name in files:
        if not (path / name).is_file():
            yield f"{path}: no {name}"
        elif trouble := _cut_short(path / name):
            yield f"{path / name}: {trouble}"


def _cut_short(file: Path) -> str | None:
    """Compare a safetensors file's size with its header; the file holds the header's length in 8 bytes, the header, and the tensors."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
        if header > _LONGEST_HEADER:
            return "it does not begin like a safetensors file"
        text = opened.read(header)
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its header is cut short" if len(text) < header else "its header is not that of a safetensors file"
    expected = 8 + header + max(ends, default=0)
    return None if size == expected else f"it has {size} bytes, its header says {expected}; download it again"


def _elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
