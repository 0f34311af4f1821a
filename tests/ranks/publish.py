"""Worker: publishes checkpoints to running engines, shard to shard, under several layouts of this world size.

`publish.py RESULT JOB`. JOB is JSON:
    config          values of a configuration but for the trainer's section
    publications    by layout, as in kept.py, in turn: [directory of a checkpoint, version] of each
    halves          optional: by version, a file of an adapter's halves, which are published instead; what the engines sampled with the
                    version is in RESULT's folder, in VERSION.msgpack, once it is published
    in_place        optional: engines pause and receive into their parameters, as on a GPU without room for staging memory
    faults          optional: what goes wrong at the n-th publication of all, {"n": [rank, kind]}; kinds are methods of `Faulty`
Every rank writes what came of each publication to RESULT.RANK, of adapters with what `replay.compare` returns; rank 0 also to RESULT.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from asyncmoe import config as configuration
from asyncmoe.errors import Disagreement, StorageError, WeightSyncError
from asyncmoe.models import load_hf_config
from asyncmoe.reshard import DeltaEncoder, Exchanger
from asyncmoe.rpc import keys
from asyncmoe.rpc.client import Client
from asyncmoe.trainer.loop import publisher
from asyncmoe.trainer.lora import canonical
from asyncmoe.trainer.model import gpt, mesh
from asyncmoe.weights.receiver import cards
from asyncmoe.weights.sender import hf_files, reshard
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.publisher import Publisher
from asyncmoe.weights.sender.sender import Sender
from tests.ranks import case, group
from tests.ranks.leaving import leave
from tests.ranks.replay import compare, read


class Faulty(Sender):
    """A sender with a fault on one rank while it sends."""

    fault: ClassVar[str | None] = None

    def _send(self, version: int, base: int | None) -> None:
        getattr(self, self.fault or "_nothing")(version, base)

    def _nothing(self, version: int, base: int | None) -> None:
        super()._send(version, base)

    def slow(self, version: int, base: int | None) -> None:
        """It is slow, but not too slow."""
        time.sleep(4.0)
        super()._send(version, base)

    def stall(self, version: int, base: int | None) -> None:
        """It does not finish within an update's time limit."""
        time.sleep(self._timeout_s + 2.0)
        super()._send(version, base)

    def killed(self, version: int, base: int | None) -> None:
        """It dies after sending part of its messages."""
        real, calls = Exchanger._pack_round, 0

        def pack_round(exchanger: Exchanger, number: int, *how: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            real(exchanger, number, *how)

        Exchanger._pack_round = pack_round  # type: ignore[method-assign]
        super()._send(version, base)

    def corrupt(self, version: int, base: int | None) -> None:
        """A bit of a message flips in transit."""
        real = Exchanger._sealed

        def sealed(exchanger: Exchanger, digest: int, number: int) -> int:
            return real(exchanger, digest, number) ^ 1

        Exchanger._sealed = sealed  # type: ignore[method-assign]
        try:
            super()._send(version, base)
        finally:
            Exchanger._sealed = real  # type: ignore[method-assign]

    def damaged(self, version: int, base: int | None) -> None:
        """A bit of an encoded delta flips in transit."""
        real = DeltaEncoder.put

        def put(encoder: DeltaEncoder, destination: int, number: int, address: int) -> int:
            nbytes = real(encoder, destination, number, address)
            ctypes.c_uint8.from_address(address + nbytes - 1).value ^= 1
            return nbytes

        DeltaEncoder.put = put  # type: ignore[method-assign]
        try:
            super()._send(version, base)
        finally:
            DeltaEncoder.put = real  # type: ignore[method-assign]


def main(file: str) -> list[dict[str, Any]]:
    job, result = json.loads(Path(file).read_text()), group.result()
    reshard.Sender = Faulty  # type: ignore[misc]
    if job.get("in_place"):
        cards.in_place = lambda _: True
    rank, world = dist.get_rank(), dist.get_world_size()
    found: list[dict[str, Any]] = []
    for layout, several in job["publications"].items():
        config = configuration.parse({**job["config"], "trainer": {"ranks": world, "dtype": "float32", **case.settings_of(layout)}})
        hf = load_hf_config(config.model.path)
        built = gpt.build(hf, config, mesh.start(config.trainer))
        with closing(Client(keys.read(config.run.dir, wait_s=10), f"trainer.{rank}")) as client:
            sender = publisher(config, built, client, ExpectedChecksums(config, built))
            for path, version in several:
                faulty, kind = job.get("faults", {}).get(str(len(found)), (None, None))
                Faulty.fault = kind if faulty == rank else None
                if Faulty.fault == "killed" and config.sync.method == "disk":
                    hf_files.copy_texts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                gpt.load_hf(built, Path(path))
                if halves := job.get("halves", {}).get(str(version)):
                    canonical.write(built, torch.load(halves))
                outcome = {"layout": layout, "version": version, **publish(sender, version)}
                if halves and outcome["error"] is None:
                    outcome |= compare(config, built, read(result.parent / f"{version}.msgpack"), config.rollout.temperature)
                found.append(outcome)
                written = Path(f"{result}.{rank}.partial")  # a kill leaves the one before whole
                written.write_text(json.dumps(found))
                written.replace(f"{result}.{rank}")
            sender.close()
        leave()
    return found


def publish(sender: Publisher, version: int) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        sender.begin(version)
        published = sender.settle()
    except (Disagreement, WeightSyncError, StorageError) as error:
        return {"error": str(error), "seconds": time.monotonic() - begin}
    if published is None:
        return {"error": None, "left_out": True, "seconds": time.monotonic() - begin}
    traffic = None if published.traffic is None else [published.traffic.nbytes, published.traffic.changed]
    return {"error": None, "seconds": published.seconds, "pause_ms": published.pause_ms, "traffic": traffic}


if __name__ == "__main__":
    group.run(main)
