"""Write the trainer's weights as a checkpoint in Hugging Face's layout."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

from safetensors.torch import save_file

from asyncmoe.models.families import without_family
from asyncmoe.models.headers import INDEX, SINGLE
from asyncmoe.models.hf_folder import copy_texts, write_config
from asyncmoe.models.quantised import without
from asyncmoe.storage import new_directory, writing
from asyncmoe.weights.sender.gather import Gatherer, tensors_in
from asyncmoe.weights.sender.trained import TrainedModel

SHARD_BYTES = 4 << 30
"""Largest weights file, unless a single tensor is larger."""


def write_hf(built: TrainedModel, origin: Path, out: Path, gatherer: Gatherer, what: str = "exported model") -> None:
    """Write the current weights as safetensors shards with an index, and copy the tokenizer from `origin`. Collective over all ranks.

    Args:
        out: the checkpoint's directory, which appears only once it is complete.
        gatherer: gathers the weights; quantised ones are written in float8, as in the original checkpoint.
        what: as for `storage.writing`.

    Raises:
        DataError: `out` exists, or cannot be created.
        StorageError: rank 0 could not write it.
    """
    count = len(gatherer.buckets)
    index: dict[str, str] = {}
    with new_directory(what, out) if built.mesh.rank == 0 else nullcontext(out) as folder, writing(what, out):
        for number, (bucket, flat) in enumerate(gatherer.run(), 1):
            if flat is None:
                continue
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            # safetensors rejects tensors that share memory, as the tensors of a bucket do.
            save_file({key: tensor.clone() for key, tensor in tensors_in(bucket, flat.cpu()).items()}, folder / name, {"format": "pt"})
            index |= dict.fromkeys(bucket.names, name)
        if built.mesh.rank != 0:
            return
        if count > 1:
            total = {"total_size": sum(bucket.nbytes for bucket in gatherer.buckets)}
            (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": index}, indent=1))
        copy_texts(origin, folder)
        hf = without_family(built.hf)
        write_config(folder, hf if gatherer.quantised else without(hf), str(built.dtype).removeprefix("torch."))
