"""Worker, on two ranks: saves that fail on one of them, and checkpoints that are damaged. `async_faults.py RESULT MODEL`"""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import torch.distributed as dist

from asyncmoe import checkpoints
from asyncmoe.errors import AsyncmoeError, DataError
from asyncmoe.platform.megatron.writer import Planned
from asyncmoe.trainer.model import checkpoint, checkpoint_choice, optimizer
from asyncmoe.trainer.model.checkpoint_saver import Saver
from tests import saving
from tests.configs import minimal
from tests.ranks import group
from tests.unit import test_checkpoints

BYTES = 64 << 10
_write = Planned.write


def main(path: str) -> dict[str, Any]:
    logging.disable(logging.ERROR)
    run = group.result().parent / "run"
    trainer = {"ranks": 2, "ep": 2, "dtype": "float32", "optimizer": {"distributed": True}, "keep_checkpoints": 2, "async_save": True}
    config = minimal(run, path, 9, trainer=trainer)
    built = saving.built(config)
    adam = optimizer.build(config, built)
    saver = Saver(config, built, adam)
    saver.save(1)
    saver.settle()
    if built.mesh.rank == 0:
        (run / "checkpoints" / "step-00000007.writing").mkdir()  # as a killed save leaves it
    failures: dict[str, Any] = {}
    trainer_section = config.trainer.model_copy(update={"async_save": False})
    standing = Saver(config.model_copy(update={"trainer": trainer_section}), built, adam)
    for step, rank, by in ((2, 1, saver), (3, 0, standing)):
        failures[str(step)] = group.everyone(limited(by, step, rank))
    Planned.write = broken if built.mesh.rank == 1 else _write  # type: ignore[method-assign]
    failures["bug"] = group.everyone(failed(saver, 4))
    Planned.write = _write  # type: ignore[method-assign]
    kept = names(run)
    loaded = checkpoint.load(checkpoints.directory(run, 1), config, built, adam)
    for step in (5, 6):  # of which the second waits for the first
        for parameter in built.weights().values():
            parameter.data.fill_(step)
        saver.save(step)
    waited = saver.stood().waited > 0
    saver.settle()
    told = [step for step, _ in saver.saved()]
    saved = names(run)
    found = {"failures": failures, "kept": kept, "loaded": loaded, "saved": saved, "told": told, "waited": waited}
    flip(checkpoints.directory(run, 6) / "__1_0.distcp")
    chosen = checkpoint_choice.choose(run, built.mesh)
    step = checkpoint.load(chosen, config, built, adam)
    values = sorted({float(value) for parameter in built.weights().values() for value in parameter.unique()})
    found["resumed"] = group.everyone([step, values, names(run)])
    flip(checkpoints.directory(run, 5) / "__0_0.distcp")
    try:
        checkpoint_choice.choose(run, built.mesh)
    except DataError as error:
        found["refused"] = group.everyone(str(error))
    return found


def flip(path: Path) -> None:
    """Change a bit of a file, on rank 0."""
    if dist.get_rank() == 0:
        test_checkpoints.flip(path)
    dist.barrier()


def broken(*_: Any) -> Any:
    raise ValueError("a bug")


def limited(saver: Saver, step: int, rank: int) -> str:
    """The message of a save while files of `rank` are limited to `BYTES`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, before[1]))
    try:
        return failed(saver, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failed(saver: Saver, step: int) -> str:
    try:
        saver.save(step)
        saver.settle()
    except AsyncmoeError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def names(run: Path) -> list[str]:
    dist.barrier()
    found = [entry.name for entry in sorted((run / "checkpoints").iterdir())]
    dist.barrier()
    return found


if __name__ == "__main__":
    group.run(main)
