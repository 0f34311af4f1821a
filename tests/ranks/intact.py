"""Worker: two ranks resume from runs whose newest checkpoint is damaged. `intact.py RESULT MODEL`.

Every run is a copy of one with checkpoints of steps 1 and 2, in which one file of step 2 is damaged.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from asyncmoe import models
from asyncmoe.config import parse
from asyncmoe.errors import AsyncmoeError
from asyncmoe.process import die_with_parent
from asyncmoe.trainer.model import checkpoint, checkpoint_choice, gpt, mesh, optimizer
from tests.ranks import group
from tests.saving import save


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 16]))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": lambda at: None,
    "flipped": lambda at: flip(at / "__1_0.distcp"),
    "cut": lambda at: os.truncate(at / "__0_0.distcp", (at / "__0_0.distcp").stat().st_size - 1),
    "missing": lambda at: (at / "__1_0.distcp").unlink(),
    "metadata": lambda at: os.truncate(at / ".metadata", 100),
    "common": lambda at: os.truncate(at / "common.pt", 9),
    "facts": lambda at: os.truncate(at / "asyncmoe.json", 0),
}


def main(result: Path, path: Path) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    original = result.parent / "run"
    config = parse(
        {
            "run": {"dir": str(original), "steps": 9},
            "model": {"path": str(path)},
            "task": {"kind": "arithmetic"},
            "trainer": {"ranks": 2, "ep": 2, "dtype": "float32"},
        }
    )
    place = mesh.start(config.trainer)
    built = gpt.build(models.load_hf_config(path), config, place)
    adam = optimizer.build(config, built)
    for step in (1, 2):
        for parameter in built.weights().values():
            parameter.data.fill_(float(step))
        save(config, step, built, adam)
    sealed = sorted(json.loads((original / "checkpoints/step-00000002/manifest.json").read_text())["files"])
    present = sorted(file.name for file in (original / "checkpoints/step-00000002").iterdir())
    found: dict[str, object] = {"sealed": sealed, "present": present}
    for name, damage in DAMAGES.items():
        run = result.parent / name
        if place.rank == 0:
            shutil.copytree(original, run)
            damage(run / "checkpoints/step-00000002")
        dist.barrier()
        chosen = checkpoint_choice.choose(run, place)
        assert chosen is not None
        step = checkpoint.load(chosen, config, built, adam)
        values = {float(value) for parameter in built.weights().values() for value in parameter.unique()}
        found[name] = group.everyone([step, sorted(values), sorted(entry.name for entry in (run / "checkpoints").iterdir())])
    both = result.parent / "both"
    if place.rank == 0:
        shutil.copytree(original, both)
        for step in (1, 2):
            flip(both / f"checkpoints/step-{step:08d}/__0_0.distcp")
    dist.barrier()
    try:
        checkpoint_choice.choose(both, place)
    except AsyncmoeError as error:
        found["both"] = group.everyone([str(error), sorted(entry.name for entry in (both / "checkpoints").iterdir())])
    if place.rank == 0:
        result.write_text(json.dumps(found))
    mesh.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
