"""One trainer rank of `asyncmoe bench sync`: `torchrun ... -m benchmarks.sync_sender CONFIG RESULT UPDATES REST_S`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path

from asyncmoe.platform import megatron

megatron.prepare()

from asyncmoe import config as configuration  # noqa: E402  Megatron must not be imported before the platform is prepared
from asyncmoe.models import load_hf_config  # noqa: E402
from asyncmoe.process import die_with_parent  # noqa: E402
from asyncmoe.rpc import keys  # noqa: E402
from asyncmoe.rpc.client import Client  # noqa: E402
from asyncmoe.trainer.loop import publisher  # noqa: E402
from asyncmoe.trainer.model import gpt, mesh  # noqa: E402
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums  # noqa: E402


def main() -> None:
    """Publish `UPDATES` versions, resting between them; rank 0 writes each one's cost to RESULT."""
    die_with_parent()
    config, result, updates, rest_s = configuration.load(Path(sys.argv[1]), []), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    place = mesh.start(config.trainer)
    built = gpt.build(load_hf_config(config.model.path), config, place)
    gpt.load_hf(built, config.model.path)
    costs = []
    with closing(Client(keys.read(config.run.dir, wait_s=config.engines.start_timeout_s), f"trainer.{place.rank}.weights")) as client:
        sync = publisher(config, built, client, ExpectedChecksums(config, built))
        for version in range(1, updates + 1):
            time.sleep(rest_s)
            sync.begin(version)
            published = sync.settle()
            assert published is not None
            costs.append({"seconds": published.seconds, "pause_ms": published.pause_ms})
        sync.close()
    if place.rank == 0:
        result.write_text(json.dumps(costs))
    mesh.stop()


if __name__ == "__main__":
    main()
