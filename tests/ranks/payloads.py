"""Worker: a run trains to the same bits wherever its trajectories lie. `payloads.py RESULT PATH LAYOUT QUEUE...`, QUEUE as JSON."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.trainer.model import mesh
from tests.ranks import case
from tests.ranks.ahead import configuration, trained


def main(result: Path, path: Path, layout: str, queues: list[str]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    (path / "run").mkdir(exist_ok=True)
    found = [trained(configuration(path, case.sizes_of(layout), **json.loads(queue)), path, ahead=True) for queue in queues]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(everyone))
    mesh.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
