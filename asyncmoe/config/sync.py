"""Weight sync."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from asyncmoe.config import transports
from asyncmoe.config.fields import NonNegative, Positive, Seconds, Section


class StoreSection(Section):
    """Weight versions as files, with sync.method store."""

    url: str | None = Field(
        None,
        description="The run's own place for its weight versions: a directory that trainer and engines share (an absolute path), or any "
        "URL that fsspec opens (s3://bucket/folder). Without user and password: its package reads credentials from the environment.",
    )
    keep: Positive = Field(2, description="Versions that stay; older ones are deleted.")
    grace_s: Seconds = Field(
        600.0,
        description="Seconds for which the files of a version stay when newer ones have taken its place: an engine may be reading them.",
    )


class SyncSection(Section):
    """Weight sync: how new weights reach the engines."""

    method: Literal["reshard", "broadcast", "store"] = Field(
        "reshard",
        description="reshard: every engine rank receives exactly its own shards from the trainer ranks that hold them while it generates, "
        "and pauses only to swap them in; broadcast: rank 0 gathers whole tensors and sends all of them to every engine, which pauses; "
        "store: every trainer rank writes what it holds to sync.store.url, and every engine rank reads its own shards from there while it "
        "generates: for engines without a path to the trainer.",
    )
    store: StoreSection = StoreSection()
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

    @model_validator(mode="after")
    def _check_store(self) -> SyncSection:
        if self.method == "store" and self.store.url is None:
            raise ValueError(
                "sync.store.url: got nothing, expected a directory or a URL because sync.method is store; name one, or set sync.method to "
                "reshard"
            )
        if self.method != "store" and self.store.url is not None:
            raise ValueError(
                f"sync.store.url: got a value, expected nothing because sync.method is {self.method}; leave "
                "it out, or set sync.method to store"
            )
        if self.method == "store" and not self.staging:
            raise ValueError(
                "sync.staging: got false, expected true because sync.method is store: a version is verified before an engine serves it; "
                "set it to true"
            )
        return self
