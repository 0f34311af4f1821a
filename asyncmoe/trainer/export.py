"""`torchrun ... -m asyncmoe.trainer.export CONFIG OUT`: the newest checkpoint of a run as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from asyncmoe.platform import megatron

megatron.prepare()

from safetensors.torch import save_file  # noqa: E402  the platform comes before everything that may import Megatron

from asyncmoe import checkpoints, models  # noqa: E402
from asyncmoe import config as configuration  # noqa: E402
from asyncmoe.config import Config  # noqa: E402
from asyncmoe.errors import AsyncmoeError, DataError  # noqa: E402
from asyncmoe.process import ERROR_PREFIX, die_with_parent  # noqa: E402
from asyncmoe.trainer import mesh, model, state  # noqa: E402
from asyncmoe.trainer.gather import Gatherer, tensors_in  # noqa: E402
from asyncmoe.trainer.model import Model  # noqa: E402

_SHARD_BYTES = 4 << 30
_WEIGHTS = {".safetensors", ".bin", ".pt", ".index.json"}


def export(config: Config, out: Path) -> None:
    """Gather the newest checkpoint and write it; collective over torchrun's ranks. `out` is complete or does not exist.

    Raises:
        DataError: the run has no complete checkpoint.
    """
    newest = checkpoints.newest(config.run.dir)
    if newest is None:
        raise DataError(str(config.run.dir), got="no complete checkpoint", expected="checkpoints/step-*")
    place = mesh.start(config.trainer, config.run.seed)
    built = model.build(models.load_hf_config(config.model.path), config, place)
    state.load(newest, config, built, None)
    write_hf(built, config.model.path, out, config.trainer.timeout_s)
    mesh.stop()


def write_hf(built: Model, origin: Path, out: Path, timeout_s: float) -> None:
    """Write the current weights as safetensors shards with an index, and everything but weights from `origin`."""
    writing = out.with_name(out.name + ".writing")
    gatherer = Gatherer(built, _SHARD_BYTES, timeout_s)
    if built.mesh.rank == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    count = len(gatherer.buckets)
    index: dict[str, str] = {}
    for number, (bucket, flat) in enumerate(gatherer.run(), 1):
        if flat is None:
            continue
        name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        # safetensors refuses tensors that share memory, as those of one bucket do.
        save_file({key: tensor.clone() for key, tensor in tensors_in(bucket, flat.cpu()).items()}, writing / name, {"format": "pt"})
        index |= dict.fromkeys(bucket.names, name)
    if built.mesh.rank != 0:
        return
    if count > 1:
        weights = {"metadata": {"total_size": sum(bucket.nbytes for bucket in gatherer.buckets)}, "weight_map": index}
        (writing / "model.safetensors.index.json").write_text(json.dumps(weights, indent=1))
    for path in origin.iterdir():
        if path.is_file() and not any(path.name.endswith(suffix) for suffix in _WEIGHTS):
            shutil.copy2(path, writing / path.name)
    writing.rename(out)


def main() -> None:
    """The command; an error meant for the user is one line."""
    die_with_parent()
    try:
        export(configuration.load(Path(sys.argv[1])), Path(sys.argv[2]))
    except AsyncmoeError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)  # other ranks may wait in a collective for this one


if __name__ == "__main__":
    main()
