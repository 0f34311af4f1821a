"""Weight sync."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncmoe.config import transports
from asyncmoe.config.fields import NonNegative, Positive, Seconds, Section, Switch, refused


class SyncSection(Section):
    """Weight sync: how new weights reach the engines."""

    method: Literal["reshard", "broadcast", "disk"] = "reshard"
    """reshard: while it generates, every engine rank receives exactly its own shards from the trainer ranks that hold them, and pauses only
    to swap them in; if a GPU has no room for a second copy of its shard, engines pause for the whole transfer. broadcast: the engines
    pause; trainer rank 0 gathers whole tensors and sends all of them to every engine. disk: trainer rank 0 writes a Hugging Face checkpoint
    to sync.directory, and every engine pauses to load it. disk is for engines that share only a file system with the trainer, and is
    refused if engines quantise weights. Adapters need reshard."""
    directory: Path | None = None
    """With sync.method disk: absolute path of a directory that the trainer and all engines see under the same path. Each run writes its
    versions to its own folder there, and leaves the last one. The folder needs room for two versions in the trainer's dtype. null:
    `weights` in run.dir."""
    transport: transports.TransportChoice = Field(transports.AUTO, description=transports.description())
    delta: Annotated[Literal["auto", "off"], Switch] = "off"
    """auto: send only the elements that changed since the previous version, if all engine ranks provably hold that version and the changes
    take at most half the size of a full update; else send everything. Updates stay full with sync.method broadcast or disk and with
    adapters. Each trainer rank keeps a copy of what it sent last beside its weights; every engine rank verifies each version by a digest of
    its shard. Useless with float32 engines, where almost every weight changes at every step. On CPUs a delta lengthens the pause. Deltas
    between GPUs have been tested only in emulation. off: send everything (docs/guides/weight-sync.md)."""
    every: Positive = 1
    """Training steps between published versions; at most queue.staleness.max_staleness + 1. Raise it if weight sync is slow."""
    bucket_bytes: Positive = 256 << 20
    """Size of a bucket in bytes: a rank's message buffers take at most two buckets."""
    nccl_max_ctas: Positive = 8
    """Maximum multiprocessors of a GPU that NCCL takes from generation or training to move weights (maxCTAs of its communicator)."""
    verify_every: NonNegative = 50
    """Compare checksums of the engines' and the trainer's weights at the first update and every n-th after it, n being this number; an
    engine that differs is fenced. Engines pause to compute checksums. Adapters and quantised weights are not compared; weights below
    adapters are, at the start and whenever a colocated engine wakes. 0: never. Set 1 to find the first faulty update."""
    timeout_s: Seconds = 300.0
    """Seconds each part of an update may take before the update fails."""

    @model_validator(mode="after")
    def _check(self) -> SyncSection:
        if self.directory is not None and self.method != "disk":
            expected = f"nothing because sync.method is {self.method}; leave it out, or set sync.method to disk"
            raise refused("sync.directory", self.directory, expected)
        if self.directory is not None and not self.directory.is_absolute():
            raise refused("sync.directory", self.directory, "an absolute path, the same on all machines of the run")
        return self
