"""`asyncmoe import-checkpoint`: write the Hugging Face checkpoint of a `torch_dist` checkpoint of Megatron's, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncmoe.errors import DataError
from asyncmoe.models import load_hf_config
from asyncmoe.models.families import family_of, with_family, without_family
from asyncmoe.models.hf_checkpoint import file_name, write_index
from asyncmoe.models.hf_folder import copy_texts, tokenizer_faults, write_config
from asyncmoe.models.importing import folder, names, settings
from asyncmoe.models.importing.folder import CheckpointTensors
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.quantised import without
from asyncmoe.models.shape import HfConfig
from asyncmoe.reshard import buckets
from asyncmoe.reshard.layout import Piece
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

    Memory: the experts of a layer, and up to 4 GiB of what is written next.

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
    family_of(hf).check(hf, MegatronParallel(), EngineParallel())
    for place in (checkpoint, model):
        if out.resolve().is_relative_to(place.resolve()):
            raise DataError("OUT", got=f"{out}, inside {place}", expected="a new path elsewhere")
    found = folder.find(checkpoint, iteration)
    notes = settings.check(found, hf, model)
    source = _Source(CheckpointTensors(found), hf)
    notes += source.check()
    if tokenizer_faults(model):
        notes.append(f"{model} has no tokenizer, so {out} has none, and a run needs one: copy one there")
    with new_directory(_WHAT, out) as scratch, writing(_WHAT, out):
        nbytes = _write_weights(scratch, source, say)
        copy_texts(model, scratch)
        write_config(scratch, _config(hf), source.dtype)
    return Imported(found, len(source.on_disk.storages), source.dtype, nbytes, tuple(notes))


class _Source:
    """The weights of a checkpoint, by their names on disk.

    Attributes:
        dtype: of most.
        on_disk: their layout in Hugging Face's files.
    """

    def __init__(self, tensors: CheckpointTensors, hf: HfConfig) -> None:
        family = family_of(hf)
        self._tensors, self._front, self._m = tensors, names.front_of(tensors), family.shape_of(hf)
        trained = family.megatron_layout(hf, MegatronParallel(), 0, "float32")
        self._parts = {
            name: names.parts_of(tensors, self._front, name, storage.shape, self._m) for name, storage in trained.storages.items()
        }
        self._pieces: dict[str, list[Piece]] = {}
        for piece in trained.pieces:
            self._pieces.setdefault(piece.tensor, []).append(piece)
        self.dtype = str(tensors.stored[self._parts[names.EMBEDDING][0].name].properties.dtype).removeprefix("torch.")
        self.on_disk = family.hf_layout(hf, self.dtype)
        self._tensor_of = {piece.storage: piece.tensor for piece in self.on_disk.pieces}

    def check(self) -> list[str]:
        """Refuse a checkpoint with other weights besides. Return notes for the user.

        Raises:
            DataError: names the first of them.
        """
        rest = sorted(self._tensors.stored.keys() - {part.name for parts in self._parts.values() for part in parts})
        inner = {name: name.removeprefix(self._front) for name in rest}
        left = [name for name in rest if not names.NOT_OURS.search(inner[name])]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            tied = ", which has tie_word_embeddings" if self._m.tied else ""
            expected = f"only the weights of the model that --model names{tied}"
            raise DataError("the checkpoint", got=f"a tensor {left[0]}{others}", expected=expected)
        prediction = any(one.startswith("mtp.") for one in inner.values())
        return ["layers of multi-token prediction are left out: asyncmoe neither trains nor serves them"] if prediction else []

    def value(self, name: str) -> torch.Tensor:
        """Return a weight in its own dtype, one that is always float32 so.

        Raises:
            DataError: a shard is missing or damaged, or the weight is not finite.
        """
        tensor, shape = self._tensor_of[name], self.on_disk.storages[name].shape
        stored = [self._stored(piece) for piece in self._pieces[tensor]]
        wide = tensor.split(".", 2)[-1] in self._m.wide
        made = torch.empty(shape, dtype=torch.float32 if wide else stored[0].dtype)
        for piece, value in zip(self._pieces[tensor], stored, strict=True):
            made[tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.extent, strict=True))] = value
        if not bool(torch.isfinite(made).all()):
            raise DataError(f"the checkpoint: {name}", got="infinite values or no numbers", expected="finite ones")
        return made

    def _stored(self, piece: Piece) -> torch.Tensor:
        parts = self._parts[piece.storage]
        read = [self._tensors.read(part.name, part.box).view(-1, *part.shape)[part.at] for part in parts]
        whole = read[0] if len(read) == 1 else torch.cat(read)
        return whole.as_strided(piece.box.extent, piece.strides, whole.storage_offset() + piece.offset)


def _write_weights(scratch: Path, source: _Source, say: Callable[[str], None]) -> int:
    """Write all tensors; return their bytes."""
    files = buckets(source.on_disk, _SHARD_BYTES)
    index: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(files, 1):
        values = {name: source.value(name) for name in bucket.names}
        save_file(values, scratch / file_name(number, len(files)), {"format": "pt"})
        index |= dict.fromkeys(values, file_name(number, len(files)))
        total += sum(value.nbytes for value in values.values())
        say(f"{total / 1e9:.1f} GB in {len(index)} tensors")
    write_index(scratch, total, index)
    return total


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of what is written: without quantisation and layers of multi-token prediction."""
    values = without(without_family(hf))
    return values | ({_PREDICTION: 0} if values.get(_PREDICTION) else {})
