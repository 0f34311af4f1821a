"""Weight sync."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncmoe.config import transports
from asyncmoe.config.fields import NonNegative, Positive, Seconds, Section


class SyncSection(Section):
    """Weight sync: how new weights reach the engines."""

    method: Literal["reshard", "broadcast"] = Field(
        "reshard",
        description="reshard: every engine rank receives exactly its own shards from the trainer ranks that hold them while it generates, "
        "and pauses only to swap them in; broadcast: rank 0 gathers whole tensors and sends all of them to every engine, which pauses.",
    )
    transport: transports.TransportChoice = Field(transports.AUTO, description=transports.description())
    staging: bool = Field(
        True,
        description="true: engines receive a version into staging memory, as large as their shard, while they generate. false: reshard "
        "writes their parameters in place while they are paused; set it if the second copy does not fit.",
    )
    every: Positive = Field(
        1,
        description="Training steps between published versions; at most queue.staleness.max_staleness + 1. "
        "Raise it if weight sync is slow.",
    )
    bucket_bytes: Positive = Field(256 << 20, description="Size of a bucket in bytes: a rank's message buffers take at most two buckets.")
    nccl_max_ctas: Positive = Field(
        8,
        description="Multiprocessors of a GPU that NCCL may use to move weights, taken from the generating engine or the training step: "
        "maxCTAs of each engine's communicator. With more than 16 engines each communicator gets fewer, at least 4.",
    )
    verify_every: NonNegative = Field(
        0, description="Compare checksums of the engines' and the trainer's weights every n updates; 0: never. 1 to find a faulty sync."
    )
    spot_check_every: NonNegative = Field(
        50,
        description="Compare checksums of a random engine when every n-th version has landed and before the next lands; 0: never. "
        "An engine whose weights somebody else wrote meanwhile is fenced. It computes the checksums twice, between two forward passes.",
    )
    timeout_s: Seconds = Field(300.0, description="Seconds each part of an update may take before it fails.")
