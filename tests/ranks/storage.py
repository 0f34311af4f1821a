"""Worker: saves that fail on one rank, and one in which the test kills a rank. `storage.py RESULT MODEL`, on two ranks.

The result is written before the last save, which does not end: rank 0's file of it is a pipe that nobody reads.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from asyncmoe import checkpoints, models
from asyncmoe.config import Config, parse
from asyncmoe.errors import StorageError
from asyncmoe.process import die_with_parent
from asyncmoe.trainer.model import checkpoint, checkpoint_saver, gpt, mesh, optimizer
from tests.ranks import group
from tests.saving import save

BYTES = 64 << 10


def main(result: Path, path: Path) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    run = result.parent / "run"
    config = parse(
        {
            "run": {"dir": str(run), "steps": 9},
            "model": {"path": str(path)},
            "task": {"kind": "arithmetic"},
            "trainer": {"ranks": 2, "ep": 2, "dtype": "float32", "optimizer": {"distributed": True}, "keep_checkpoints": 1},
        }
    )
    place = mesh.start(config.trainer)
    built = gpt.build(models.load_hf_config(path), config, place)
    adam = optimizer.build(config, built)
    save(config, 1, built, adam)
    (run / "checkpoints" / "step-00000007.writing").mkdir(exist_ok=True)  # as a killed save leaves it
    failures = {}
    for step, rank in ((2, 1), (3, 0)):
        failures[step] = group.everyone(failed(config, step, built, adam, rank))
    kept = [entry.name for entry in sorted((run / "checkpoints").iterdir())]
    loaded = checkpoint.load(run / "checkpoints" / "step-00000001", config, built, adam)
    save(config, 4, built, adam)
    saved = [entry.name for entry in sorted((run / "checkpoints").iterdir())]
    pids = group.everyone(str(os.getpid()))
    blocked = checkpoints.temporary(run, 5)
    if place.rank == 0:
        blocked.mkdir()
        os.mkfifo(blocked / "__0_0.distcp")
        found = {"failures": failures, "kept": kept, "loaded": loaded, "saved": saved, "pids": pids}
        result.with_suffix(".part").write_text(json.dumps(found))
        result.with_suffix(".part").rename(result)
    dist.barrier()
    checkpoint_saver.checkpoints.start = lambda *_: None  # type: ignore[attr-defined]  # the pipe stays
    save(config, 5, built, adam)


def failed(config: Config, step: int, built: gpt.Model, adam: optimizer.MegatronOptimizer, rank: int) -> str:
    """What a save says while files of `rank` may not become larger than `BYTES`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, before[1]))
    try:
        save(config, step, built, adam)
    except StorageError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
