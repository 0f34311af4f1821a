"""Worker: publishes adapters to running engines and, after each, looks what it makes of what they then sampled, under several layouts.

`adapted.py RESULT JOB`: as of publish.py, but publications are [file of halves, version]. What the engines sampled with version
V is in RESULT's folder, in `V.msgpack`, when V is published. Each outcome has what `replay.compare` returns besides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe import config as configuration
from asyncmoe.models import load_hf_config
from asyncmoe.rpc import keys
from asyncmoe.rpc.client import Client
from asyncmoe.trainer.lora import canonical
from asyncmoe.trainer.model import gpt, mesh
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.reshard import ReshardPublisher
from tests.ranks import group
from tests.ranks.kept import settings_of
from tests.ranks.leaving import leave
from tests.ranks.publish import publish
from tests.ranks.replay import compare, read


def main(result: Path, job: dict[str, Any]) -> None:
    group.begin()
    rank, world = dist.get_rank(), dist.get_world_size()
    found: list[dict[str, Any]] = []
    for layout in job["layouts"]:
        config = configuration.parse({**job["config"], "trainer": {"ranks": world, "dtype": "float32", **settings_of(layout)}})
        built = gpt.build(load_hf_config(config.model.path), config, mesh.start(config.trainer))
        gpt.load_hf(built, config.model.path)
        with Client(keys.read(config.run.dir, wait_s=10), f"trainer.{rank}") as client:
            sender = ReshardPublisher(config, built, client, ExpectedChecksums(config, built))
            for file, version in job["publications"][layout]:
                canonical.write(built, torch.load(file))
                outcome = {"layout": layout, "version": version, **publish(sender, version)}
                if outcome["error"] is None:
                    outcome |= compare(config, built, read(result.parent / f"{version}.msgpack"), config.rollout.temperature)
                found.append(outcome)
            sender.close()
        leave()
    Path(f"{result}.{rank}").write_text(json.dumps(found))
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
