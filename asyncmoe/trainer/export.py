"""`torchrun ... -m asyncmoe.trainer.export RUN STEP OUT [FORM]`: export a checkpoint of a run as a Hugging Face checkpoint with adapters
merged into the weights, or in another form (see `export`)."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from asyncmoe.platform import megatron

megatron.prepare()

from safetensors.torch import save_file  # noqa: E402  prepare the platform before anything imports Megatron

from asyncmoe import checkpoints, models, storage  # noqa: E402
from asyncmoe import config as configuration  # noqa: E402
from asyncmoe.checkpoints import intact  # noqa: E402
from asyncmoe.config import Config  # noqa: E402
from asyncmoe.errors import AsyncmoeError, StorageError  # noqa: E402
from asyncmoe.models import family_of  # noqa: E402
from asyncmoe.models.families import without_family  # noqa: E402
from asyncmoe.models.hf_checkpoint import copy_texts, file_name, write_index  # noqa: E402
from asyncmoe.models.lora import peft  # noqa: E402
from asyncmoe.models.lora.adapter import expanded  # noqa: E402
from asyncmoe.models.quantised import KEY, without  # noqa: E402
from asyncmoe.process import die_with_parent, leave, named, say  # noqa: E402
from asyncmoe.trainer.lora.files import gathered  # noqa: E402
from asyncmoe.trainer.lora.merge import merge  # noqa: E402
from asyncmoe.trainer.model import checkpoint, checkpoint_choice, gpt, mesh  # noqa: E402
from asyncmoe.trainer.model.gpt import Model  # noqa: E402
from asyncmoe.trainer.weight_sync.gather import Gatherer, tensors_in  # noqa: E402

_SHARD_BYTES = 4 << 30


def export(config: Config, step: int, out: Path, form: str = "weights") -> None:
    """Gather the checkpoint of `step` and write it. Collective over torchrun's ranks. `out` is complete or does not exist.

    Args:
        form: "weights": in the trainer's dtype; "adapter": the adapter alone, if the run trains one; "float8": weights in float8, if the
            model was published in float8.

    Raises:
        DataError: the checkpoint is damaged.
        UserError: PEFT's format cannot express the adapter.
        StorageError: the export could not be written.
    """
    path = checkpoints.directory(config.run.dir, step)
    place = mesh.start(config.trainer, config.run.seed)
    if (fault := checkpoint_choice.agreed_fault(path, place)) is not None:
        raise intact.refused(path, fault)
    built = gpt.build(models.hf_config_of(config), config, place)
    checkpoint.load(path, config, built, None)
    if built.adapter is not None and form != "adapter":
        gpt.load_hf(built, config.model.path)
        merge(built.chunks)
    writers: dict[str, Callable[[Model, Path, Path, float], None]] = {
        "weights": write_hf,
        "adapter": write_adapter,
        "float8": partial(write_hf, quantised=True),
    }
    try:
        with storage.writing("exported model", out):
            writers[form](built, config.model.path, out, config.trainer.timeout_s)
    except StorageError:
        shutil.rmtree(_unfinished(out), ignore_errors=True)
        raise
    mesh.stop()


def _unfinished(out: Path) -> Path:
    return out.with_name(out.name + ".writing")


def write_adapter(built: Model, origin: Path, out: Path, timeout_s: float) -> None:
    """Write the current adapter in PEFT's format; halves that experts share are repeated for each expert.

    Args:
        origin: the base model of the adapter.

    Raises:
        UserError: see `asyncmoe.models.lora.peft.check_expressible`.
    """
    assert built.adapter is not None
    shape, kind = family_of(built.hf).shape_of(built.hf), built.adapter
    peft.check_expressible(shape, replace(kind, experts="per_expert"))
    whole = gathered(built, Gatherer(built, _SHARD_BYTES, timeout_s, adapter=True))
    if whole is None:
        return
    writing = _unfinished(out)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    peft.write(writing, peft.to_peft(shape, expanded(shape, whole), str(origin)))
    writing.rename(out)


def write_hf(built: Model, origin: Path, out: Path, timeout_s: float, *, quantised: bool = False) -> None:
    """Write the current weights as safetensors shards with an index, and copy all other files from `origin`.

    Args:
        quantised: quantise the weights as in the original float8 checkpoint.
    """
    writing = _unfinished(out)
    gatherer = Gatherer(built, _SHARD_BYTES, timeout_s, quantised=quantised)
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
    if KEY in built.hf and not quantised:
        (writing / "config.json").write_text(json.dumps(without(without_family(built.hf)), indent=2))
    for path in writing.glob("*.safetensors"):
        path.chmod((writing / "config.json").stat().st_mode)  # safetensors writes for its user alone
    writing.rename(out)


def main() -> None:
    """Run the command; print user-facing errors as one line."""
    die_with_parent()
    try:
        with named(f"export.{os.environ.get('RANK', '0')}"):
            export(configuration.of_run(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
    except AsyncmoeError as error:
        say(error)
        leave(error.exit_code)
    leave(0)


if __name__ == "__main__":
    main()
