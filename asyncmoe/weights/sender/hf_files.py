"""Write the trainer's weights as a checkpoint in Hugging Face's layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from asyncmoe.models.families import without_family
from asyncmoe.models.headers import INDEX, SINGLE
from asyncmoe.models.hf_folder import copy_texts, write_config
from asyncmoe.models.quantised import without
from asyncmoe.weights.sender.gather import Gatherer, tensors_in
from asyncmoe.weights.sender.trained import TrainedModel

SHARD_BYTES = 4 << 30
"""Largest weights file, unless a single tensor is larger."""


def unfinished(out: Path) -> Path:
    """Return where a checkpoint is written before it becomes `out`."""
    return out.with_name(f".{out.name}.writing")


def write_hf(built: TrainedModel, origin: Path, out: Path, gatherer: Gatherer) -> None:
    """Write the current weights as safetensors shards with an index, and copy the tokenizer from `origin`. Collective over all ranks.

    Args:
        out: the checkpoint's directory, which appears only once it is complete.
        gatherer: gathers the weights; quantised ones are written in float8, as in the original checkpoint.
    """
    writing = unfinished(out)
    if built.mesh.rank == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    count = len(gatherer.buckets)
    index: dict[str, str] = {}
    for number, (bucket, flat) in enumerate(gatherer.run(), 1):
        if flat is None:
            continue
        name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        # safetensors rejects tensors that share memory, as the tensors of a bucket do.
        save_file({key: tensor.clone() for key, tensor in tensors_in(bucket, flat.cpu()).items()}, writing / name, {"format": "pt"})
        index |= dict.fromkeys(bucket.names, name)
    if built.mesh.rank != 0:
        return
    if count > 1:
        total = {"total_size": sum(bucket.nbytes for bucket in gatherer.buckets)}
        (writing / INDEX).write_text(json.dumps({"metadata": total, "weight_map": index}, indent=1))
    copy_texts(origin, writing)
    hf = without_family(built.hf)
    write_config(writing, hf if gatherer.quantised else without(hf), str(built.dtype).removeprefix("torch."))
    writing.rename(out)
