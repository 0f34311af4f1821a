"""Compares the contents of a model's safetensors files with its family's layout before anything starts. Only headers are read, except that
a tied model's output layer, if it is stored too, is compared with the embedding.

Source: the files an engine reads: `filter_duplicate_safetensors_files` of sglang 0.5.23 (model_loader/weight_utils.py). If a directory has
an index and also model.safetensors, engines read the index's files, but transformers reads model.safetensors (modeling_utils.py,
`_get_resolved_checkpoint_files`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from asyncmoe.errors import DataError
from asyncmoe.models.hf_folder import pointers
from asyncmoe.models.payload import Payload
from asyncmoe.reshard.float8 import FLOAT8, SCALES
from asyncmoe.reshard.layout import Storage

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PLAIN = ("BF16", "F32", "F16")
_CORRECT = "correct config.json, or use a checkpoint that it describes"
_WAYS_OUT = (
    (r"experts\.(gate_up_proj|down_proj)$", "save it with save_pretrained(..., save_original_format=True) of transformers"),
    (r"\.lora_|\.base_layer\.", "merge the adapter into the weights (merge_and_unload of PEFT), or train with lora.start"),
    (r"_scale|qweight|qzeros|g_idx|absmax|quant_|_packed", "it looks quantised, but config.json does not say so: use bfloat16 weights"),
    ("^lm_head", f"set tie_word_embeddings to false, or {_CORRECT}"),
    ("", _CORRECT),
)
"""Patterns of names of unexpected tensors, and fixes; the first match applies."""


class _Index(BaseModel):
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\]+$")]] = Field(min_length=1)


@dataclass(frozen=True)
class _Stored:
    file: Path
    dtype: str
    shape: tuple[int, ...]


def faults(path: Path, hf: Mapping[str, Any]) -> list[DataError]:
    """Return all faults of a model directory's weights; equal faults of several tensors are merged.

    Ignores tensors that loading ignores: rotary frequencies, and multi-token prediction layers.

    Raises:
        UserError: the configuration describes no model.
    """
    if found := pointers(path):
        return found
    try:
        found, stored = _stored(path, files_of(path))
    except DataError as error:
        return [error]
    layout = Payload(hf).whole("bfloat16").storages if stored else {}
    predicting = "|".join(name.split(".")[2] for name in stored if ".eh_proj." in name) or "none"
    left_out = re.compile(rf"rotary_emb\.inv_freq$|^model\.layers\.({predicting})\.")
    wrong: dict[tuple[str, str, str], list[str]] = {}
    for name in [*layout, *(name for name in stored if name not in layout and not left_out.search(name))]:
        for one in _differences(name, stored, layout.get(name)):
            wrong.setdefault(one, []).append(name)
    for (got, expected, way_out), names in wrong.items():
        found.append(DataError(f"{path}: {_told(names)}", got=got, expected=expected, hint=way_out))
    return found


def _differences(name: str, stored: Mapping[str, _Stored | None], wanted: Storage | None) -> Iterator[tuple[str, str, str]]:
    """Yield (got, expected, way out)."""
    held = stored.get(name)
    if name not in stored:
        yield "nothing", "a tensor, as config.json has it", _CORRECT
    elif held is not None and wanted is None and not (name == _OUTPUT and _same(held, stored.get(_EMBEDDING))):
        yield "a tensor", "nothing, as config.json has it", next(way for pattern, way in _WAYS_OUT if re.search(pattern, name))
    elif held is not None and wanted is not None:
        if held.shape != wanted.shape:
            yield f"shape {list(held.shape)}", f"{list(wanted.shape)}, as config.json has it", _CORRECT
        dtypes = ("F8_E4M3",) if wanted.dtype == FLOAT8 else ("F32",) if name.endswith(SCALES) else _PLAIN
        if held.dtype not in dtypes:
            has = "no" if dtypes == _PLAIN else "a"
            yield f"dtype {held.dtype}", f"{' or '.join(dtypes)}, as config.json has {has} quantization_config", _CORRECT


def files_of(path: Path) -> dict[str, str] | None:
    """Return the file of each tensor according to the index; None if there is no index.

    Raises:
        DataError: the index is invalid.
    """
    if not (path / INDEX).is_file():
        return None
    try:
        return _Index.model_validate_json((path / INDEX).read_bytes()).weight_map
    except (OSError, ValidationError) as error:
        got = "{loc}: {msg}".format_map(error.errors()[0]) if isinstance(error, ValidationError) else str(error)
        expected = "a safetensors index, whose weight_map names a file in the same directory for each tensor"
        raise DataError(str(path / INDEX), got=got, expected=expected, hint="download it again") from error


def _stored(path: Path, named: Mapping[str, str] | None) -> tuple[list[DataError], dict[str, _Stored | None]]:
    """Return the faults of a model's files, and their tensors by name; None for a tensor whose file cannot be read."""
    found: list[DataError] = []
    stored: dict[str, _Stored | None] = {}
    elsewhere: list[str] = []
    there = {file.name for file in path.glob("*.safetensors")}
    if beside := there - {SINGLE, "consolidated.safetensors"} if named is None else {SINGLE} & there - {*named.values()}:
        expected = f"{SINGLE} alone, or {INDEX} and the files that it names"
        found.append(DataError(str(path), got=_told([*beside]), expected=expected, hint="move files of other models away"))
    for file in [SINGLE] if named is None else sorted(set(named.values())):
        held = _header(path / file)
        if isinstance(held, DataError):
            found.append(held)
            stored |= {name: None for name, place in (named or {}).items() if place == file}
        else:
            right = {name: one for name, one in held.items() if named is None or named.get(name) == file}
            elsewhere += held.keys() - right.keys()
            stored = {**held, **stored, **right}
    if elsewhere:
        found.append(DataError(str(path / INDEX), got=f"{_told(elsewhere)} in another file", expected="the file that the index names"))
    return found, stored


def _header(file: Path) -> dict[str, _Stored] | DataError:
    """Return the tensors of a safetensors file, or the fault of its header or length."""
    from safetensors import SafetensorError, safe_open  # not installed everywhere a configuration is read

    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: _Stored(file, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (OSError, SafetensorError) as error:
        pickled = not file.is_file() and any(file.parent.glob("*.bin"))
        hint = "convert the .bin files: load them with transformers and call save_pretrained" if pickled else "download it again"
        got = f"no {file.name}" if isinstance(error, FileNotFoundError) else str(error)
        return DataError(str(file), got=got, expected="a whole safetensors file", hint=hint)


def _same(output: _Stored, embedding: _Stored | None) -> bool:
    """Return whether a tied model's stored output layer equals its embedding."""
    import torch
    from safetensors import safe_open

    if embedding is None or embedding.dtype != output.dtype:
        return False
    with safe_open(output.file, "pt") as first, safe_open(embedding.file, "pt") as second:
        return torch.equal(first.get_tensor(_OUTPUT), second.get_tensor(_EMBEDDING))


def _told(names: list[str]) -> str:
    """List tensor names; only the first of several that differ only in numbers, such as layer numbers, is given."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name))]):
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    told = [first + (f" and {len(more)} like it" if more else "") for first, *more in kinds.values()]
    return ", ".join(told[:4]) + (f" and {len(told) - 4} more kinds" if told[4:] else "")
