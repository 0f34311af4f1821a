"""`torchrun ... -m asyncmoe.trainer.export RUN STEP OUT [FORM [DTYPE]]`: export a checkpoint of a run as a Hugging Face checkpoint with
adapters merged into the weights, or in another form (see `export`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from asyncmoe.platform import megatron

megatron.prepare()

from asyncmoe import checkpoints, models, storage  # noqa: E402  prepare the platform before anything imports Megatron
from asyncmoe import config as configuration  # noqa: E402
from asyncmoe.checkpoints import intact  # noqa: E402
from asyncmoe.checkpoints.manifest import MANIFEST  # noqa: E402
from asyncmoe.config import Config  # noqa: E402
from asyncmoe.models import shape_of  # noqa: E402
from asyncmoe.models.lora import peft  # noqa: E402
from asyncmoe.models.lora.adapter import Adapter  # noqa: E402
from asyncmoe.process import WARNING, run_rank  # noqa: E402
from asyncmoe.trainer.lora.merge import merge  # noqa: E402
from asyncmoe.trainer.model import checkpoint, checkpoint_choice, gpt, mesh  # noqa: E402
from asyncmoe.trainer.model.gpt import Model  # noqa: E402
from asyncmoe.weights.sender.gather import Gatherer, tensors_in  # noqa: E402
from asyncmoe.weights.sender.hf_files import SHARD_BYTES, write_hf  # noqa: E402


def export(config: Config, step: int, out: Path, form: str = "weights", dtype: str = "") -> None:
    """Gather the checkpoint of `step` and write it. Collective over torchrun's ranks. `out` is complete or does not exist.

    Args:
        form: "weights": the merged weights; "adapter": the adapter alone, if the run trains one; "float8": weights in float8, if the
            model was published in float8.
        dtype: dtype of the weights; "": the trainer's.

    Raises:
        DataError: the checkpoint is damaged, or `out` exists.
        UserError: PEFT's format cannot express the adapter.
        StorageError: the export could not be written.
    """
    path = checkpoints.directory(config.run.dir, step)
    if dtype:
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"dtype": dtype, "precision": None})})
    place = mesh.start(config.trainer, config.run.seed)
    if (path / MANIFEST).exists() and (fault := checkpoint_choice.agreed_fault(path, place)) is not None:
        raise intact.refused(path, fault)
    built = gpt.build(models.hf_config_of(config), config, place)
    checkpoint.load(path, config, built, None)
    if built.adapter is not None and form != "adapter":
        gpt.load_hf(built, config.model.path)
        lost = merge(built.chunks)
        if place.rank == 0 and lost > 0.01:
            print(f"{WARNING}merging rounds away {lost:.0%} of the adapter; --dtype float32 keeps all of it, so does --adapter", flush=True)
    gatherer = Gatherer(built, SHARD_BYTES, config.trainer.timeout_s, adapter=form == "adapter", quantised=form == "float8")
    (write_adapter if form == "adapter" else write_hf)(built, config.model.path, out, gatherer)
    mesh.stop()


def write_adapter(built: Model, origin: Path, out: Path, gatherer: Gatherer) -> None:
    """Write the current adapter in PEFT's format; halves that experts share are repeated for each expert.

    Args:
        origin: the base model of the adapter.
        gatherer: gathers the adapter.

    Raises:
        DataError, StorageError: see `storage.new_directory`.
        UserError: see `asyncmoe.models.lora.peft.check_expressible`.
    """
    assert built.adapter is not None
    shape, kind = shape_of(built.hf), built.adapter
    peft.check_expressible(shape, kind)
    halves: dict[str, np.ndarray] = {}
    for bucket, flat in gatherer.run():
        if flat is not None:
            halves |= {name: _array(tensor) for name, tensor in tensors_in(bucket, flat.cpu()).items()}
    if built.mesh.rank:
        return
    whole = Adapter(kind, str(built.dtype).removeprefix("torch."), halves)
    what = "exported model"
    with storage.new_directory(what, out) as folder, storage.writing(what, out):
        peft.write(folder, peft.to_peft(shape, whole, str(origin)))


def _array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def main() -> None:
    """Run the command; print user-facing errors as one line."""
    run_rank(
        f"export.{os.environ.get('RANK', '0')}",
        lambda: export(configuration.of_run(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]),
    )


if __name__ == "__main__":
    main()
