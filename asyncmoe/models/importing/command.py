"""`asyncmoe import-checkpoint`: write the Hugging Face checkpoint of a `torch_dist` checkpoint of Megatron's, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncmoe.errors import DataError
from asyncmoe.models import load_hf_config
from asyncmoe.models.checkpoint import hf_name
from asyncmoe.models.families import family_of, with_family, without_family
from asyncmoe.models.hf_checkpoint import file_name, write_index
from asyncmoe.models.hf_folder import copy_texts, tokenizer_faults, write_config
from asyncmoe.models.importing import folder, names, settings
from asyncmoe.models.importing.names import TensorPart
from asyncmoe.models.importing.tensors import CheckpointTensors
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.quantised import without
from asyncmoe.models.shape import HfConfig, Shape, Shapes
from asyncmoe.reshard.layout import Piece, RankLayout
from asyncmoe.storage import check_new, new_directory, writing

_WHAT = "imported model"
_SHARD_BYTES = 4 << 30
_PREDICTION = "num_nextn_predict_layers"


@dataclass(frozen=True)
class Imported:
    """What was written.

    Attributes:
        source: the folder of the iteration.
        dtype: of the weights, as torch prints it without the prefix.
        nbytes: of all tensors.
        notes: what the user should know, a line each.
    """

    source: Path
    tensors: int
    dtype: str
    nbytes: int
    notes: tuple[str, ...]


def import_checkpoint(
    checkpoint: Path,
    out: Path,
    model: Path,
    iteration: int | None = None,
    family: str = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> Imported:
    """Write `out`, which is complete or does not exist: the weights of the checkpoint, with configuration and tokenizer of `model`.

    Memory: one shard of the checkpoint, one of Megatron's parameters, and up to 4 GiB of what is written next.

    Args:
        checkpoint, iteration: see `folder.find`.
        model: a Hugging Face directory of the same model; its weights are not read, and may be missing.
        family: see `families.with_family`.
        say: is told of the progress.

    Raises:
        DataError: the checkpoint is none, is not whole, or lacks a tensor; `out` exists, lies in one of the others,
            or is where nothing can be made.
        UserError: the checkpoint is of another model; has a line for each setting that differs. Or as `family_of`.
        ConfigError: asyncmoe cannot train such a model.
        StorageError: `out` could not be written.
    """
    check_new(_WHAT, out)
    if model.is_file():
        raise DataError("--model", got=f"the file {model}", expected="the directory of a Hugging Face model, with its tokenizer")
    hf = with_family(load_hf_config(model), family)
    found = folder.find(checkpoint, iteration)
    family_of(hf).check(hf, MegatronParallel(), EngineParallel())
    for place in (checkpoint, model):
        if out.resolve().is_relative_to(place.resolve()):
            raise DataError("OUT", got=f"{out}, inside {place}", expected="a new path elsewhere")
    notes = settings.check(found, hf, model)
    source = _Source(CheckpointTensors(found), hf)
    notes += source.check()
    if tokenizer_faults(model):
        notes.append(f"{model} has no tokenizer, so {out} has none, and a run needs one: copy one there")
    with new_directory(_WHAT, out) as scratch, writing(_WHAT, out):
        nbytes, count = _write_weights(scratch, source, say)
        copy_texts(model, scratch)
        write_config(scratch, _config(hf), source.dtype)
    return Imported(found, count, source.dtype, nbytes, tuple(notes))


class _Source:
    """The canonical tensors of a checkpoint."""

    def __init__(self, tensors: CheckpointTensors, hf: HfConfig) -> None:
        family = family_of(hf)
        self._tensors, self._front = tensors, names.front_of(tensors)
        self._m: Shape = family.shape_of(hf)
        self._hf_names = family.hf_names
        self.shapes: Shapes = family.tensors(hf)
        self._layout: RankLayout = family.megatron_layout(hf, MegatronParallel(), 0, "float32")
        self._parts = {name: self._parts_of(name, storage.shape) for name, storage in self._layout.storages.items()}
        self._dtypes = {name: tensors.stored(parts[0].name).dtype for name, parts in self._parts.items()}
        self.dtype = str(self._dtypes["embedding.word_embeddings.weight"]).removeprefix("torch.")

    def _parts_of(self, parameter: str, shape: tuple[int, ...]) -> list[TensorPart]:
        return names.parts_of(self._tensors, self._front, parameter, shape, self._m.layers, self._m.experts)

    def check(self) -> list[str]:
        """Find out, without reading weights, whether all are there, whole, and none is left over. Return notes for the user.

        Raises:
            DataError: names the first fault.
        """
        taken = {part.name for parts in self._parts.values() for part in parts}
        self._tensors.check(sorted(taken))
        left, prediction = names.left_over(self._tensors, self._front, taken)
        tied = f"{self._front}output_layer.weight"
        if self._m.tied and tied in left:
            raise DataError("the checkpoint", got=f"a tensor {tied}", expected="none: config.json of --model has tie_word_embeddings")
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise DataError(
                "the checkpoint", got=f"a tensor {left[0]}{others}", expected="the weights of the model that --model names only"
            )
        return ["layers of multi-token prediction are left out: asyncmoe neither trains nor serves them"] if prediction else []

    def hf_name(self, tensor: str) -> str:
        return hf_name(self._m, self._hf_names, tensor)

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every canonical tensor once, in the order of Megatron's parameters.

        Raises:
            DataError: a shard is damaged, or a weight is not finite.
        """
        pieces: dict[str, list[Piece]] = {}
        for piece in self._layout.pieces:
            pieces.setdefault(piece.storage, []).append(piece)
        for parameter, parts in self._parts.items():
            whole = torch.cat([self._tensors.read(part.name, part.box) for part in parts])
            flat = whole.reshape(-1)
            made: dict[str, torch.Tensor] = {}
            for piece in pieces[parameter]:
                tensor = made.setdefault(
                    piece.tensor, torch.empty(self.shapes[piece.tensor], dtype=self._dtype_of(piece.tensor, parameter))
                )
                box = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.extent, strict=True))
                tensor[box] = flat.as_strided(piece.box.extent, piece.strides, piece.offset)
            for name, tensor in made.items():
                if not bool(torch.isfinite(tensor).all()):
                    where = parts[0].name
                    raise DataError(f"the checkpoint: tensor {where}", got="infinite values or no numbers", expected="finite ones")
                yield name, tensor

    def _dtype_of(self, tensor: str, parameter: str) -> torch.dtype:
        return torch.float32 if tensor.split(".", 2)[-1] in self._m.wide else self._dtypes[parameter]


def _write_weights(scratch: Path, source: _Source, say: Callable[[str], None]) -> tuple[int, int]:
    """Write all tensors; return their bytes and their number."""
    index: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    files: list[str] = []
    size = total = 0

    def write() -> None:
        name = f"part-{len(files) + 1:05d}.safetensors"
        save_file(held, scratch / name, {"format": "pt"})
        files.append(name)
        index.update(dict.fromkeys(held, name))
        held.clear()
        say(f"{total / 1e9:.1f} GB in {len(index)} tensors")

    for tensor, value in source.values():
        if held and size + value.nbytes > _SHARD_BYTES:
            write()
            size = 0
        held[source.hf_name(tensor)] = value
        size, total = size + value.nbytes, total + value.nbytes
    write()
    final = {name: file_name(number, len(files)) for number, name in enumerate(files, 1)}
    for name, last in final.items():
        (scratch / name).rename(scratch / last)
    write_index(scratch, total, {name: final[file] for name, file in index.items()})
    return total, len(index)


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of what is written: without quantisation and layers of multi-token prediction."""
    values = without(without_family(hf))
    return values | ({_PREDICTION: 0} if values.get(_PREDICTION) else {})
