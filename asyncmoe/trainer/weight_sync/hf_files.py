"""Write the trainer's weights as a checkpoint in Hugging Face's layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from asyncmoe.models.families import without_family
from asyncmoe.models.hf_checkpoint import copy_texts, file_name, write_index
from asyncmoe.models.quantised import KEY, without
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.trainer.weight_sync.gather import Gatherer, tensors_in

SHARD_BYTES = 4 << 30
"""Largest file of weights, unless one tensor is larger."""


def unfinished(out: Path) -> Path:
    """Return where a checkpoint is written before it becomes `out`."""
    return out.with_name(out.name + ".writing")


def write_hf(built: Model, origin: Path, out: Path, gatherer: Gatherer) -> None:
    """Write the current weights as safetensors shards with an index, and copy all other files from `origin`. Collective over all ranks.

    Args:
        out: complete, or it does not exist.
        gatherer: of the weights; quantised ones are written in float8, as in the original checkpoint.
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
        name = file_name(number, count)
        # safetensors rejects tensors that share memory, as the tensors of a bucket do.
        save_file({key: tensor.clone() for key, tensor in tensors_in(bucket, flat.cpu()).items()}, writing / name, {"format": "pt"})
        index |= dict.fromkeys(bucket.names, name)
    if built.mesh.rank != 0:
        return
    write_index(writing, sum(bucket.nbytes for bucket in gatherer.buckets), index)
    copy_texts(origin, writing)
    shutil.copyfile(origin / "config.json", writing / "config.json")
    if KEY in built.hf and not gatherer.quantised:
        (writing / "config.json").write_text(json.dumps(without(without_family(built.hf)), indent=2))
    for path in writing.glob("*.safetensors"):
        path.chmod((writing / "config.json").stat().st_mode)  # safetensors writes for its user alone
    writing.rename(out)
