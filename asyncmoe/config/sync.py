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
    to swap them in; where a GPU has no room for a second copy of its shard, engines pause for the whole transfer. broadcast: rank 0
    gathers whole tensors and sends all of them to every engine, which pauses. disk: rank 0 writes a Hugging Face checkpoint to
    sync.directory, and every engine pauses and loads it: for engines that share only a file system with the trainer; refused with quantised
    engines. Adapters need reshard."""
    directory: Path | None = None
    """With sync.method disk: the absolute path of a directory on a file system that the trainer and all engines see under the same path,
    in which each run has a folder of its own for its versions; null: the folder weights in run.dir. It needs room for two versions in the
    trainer's dtype. The last version stays."""
    transport: transports.TransportChoice = Field(transports.AUTO, description=transports.description())
    delta: Annotated[Literal["auto", "off"], Switch] = "off"
    """auto: send only the elements that changed since the previous version, if all engine ranks provably hold that one and the changes take
    at most half the size of a full update; else send everything. Updates stay full with sync.method broadcast or disk and with adapters.
    Each trainer rank keeps a copy of what it sent last, in the same memory as its weights, and every engine rank proves each version with a
    digest of its whole shard. Useless with float32 engines, where almost every weight changes at every step: set engines.dtype to bfloat16.
    On CPUs a delta lengthens the pause. Between GPUs this has been tested only in emulation, never on a GPU. off: send everything
    (docs/guides/weight-sync.md)."""
    every: Positive = 1
    """Training steps between published versions; at most queue.staleness.max_staleness + 1. Raise it if weight sync is slow."""
    bucket_bytes: Positive = 256 << 20
    """Size of a bucket in bytes: a rank's message buffers take at most two buckets."""
    nccl_max_ctas: Positive = 8
    """Multiprocessors of a GPU that NCCL may use to move weights, taken from the generating engine or the training step: maxCTAs of its
    communicator."""
    verify_every: NonNegative = 50
    """Compare checksums of the engines' and the trainer's weights at the first update and every n updates after it; an engine that
    differs is fenced. Each trainer rank hashes a share of an engine's parameters, and engines pause until they have computed theirs.
    Adapters and weights that engines quantise are not compared. 0: never. Set 1 to find out when a sync is faulty."""
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
