"""Publish a weight version as files, for engines that have no path to the trainer (`asyncmoe.version_store`).

Every trainer rank writes its share from a background thread, while the next step computes; only the optimizer update waits until it is
written. With `sync.delta` each rank writes what changed since the version before, and, from time to time, everything. Then rank 0 writes
the manifest: the version exists. From there on nobody needs the trainer's weights: rank 0 has the controller
start receivers in the engines, which meet it through small files in the same place (`asyncmoe.receiver.file_keys`), announces the version,
and when all engine ranks have read and verified their shards, asks the controller to commit it. If an engine dies meanwhile, or starts
again, the version is announced once more to those that are there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ConfigError, WeightSyncError
from asyncmoe.models import EngineParallel, engine_dtype
from asyncmoe.models.payload import Payload
from asyncmoe.receiver import failing
from asyncmoe.rpc.client import Client
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.trainer.weight_sync.announcer import Announcer
from asyncmoe.trainer.weight_sync.background import BackgroundPublisher
from asyncmoe.trainer.weight_sync.publisher import Expected, Published, Traffic, Verifier
from asyncmoe.trainer.weight_sync.rendezvous import starving
from asyncmoe.trainer.weight_sync.sender import LOOK_S
from asyncmoe.version_store import (
    Geometry,
    Retention,
    ShareSize,
    ShareWriter,
    StoredObject,
    VersionId,
    VersionStore,
    divide,
    of_run,
    publish,
)
from asyncmoe.version_store.manifest import objects_from_json, objects_to_json

log = logging.getLogger(__name__)
_MOST_TOLD = 1 << 28
"""Bytes that a rank tells the others at a time."""


class StorePublisher(BackgroundPublisher):
    """See `asyncmoe.trainer.weight_sync.publisher.Publisher`.

    Args:
        client, checksums: as for `BackgroundPublisher`.

    Raises:
        ConfigError: a setting this path does not support.
        UserError: the store cannot be opened, or is another run's.
    """

    def __init__(self, config: Config, model: Model, client: Client, checksums: Verifier) -> None:
        if model.mesh.device.type != "cpu":
            expected = "reshard or broadcast with weights on GPUs: versions are written from host memory so far"
            raise ConfigError("sync.method", got="store", expected=expected)
        super().__init__(config, model, client, checksums)
        mesh, dtype = model.mesh, str(model.dtype).removeprefix("torch.")
        payload = Payload(model.hf)
        sources = payload.trainer(model.parallel, dtype)
        readers = payload.engines(EngineParallel(config.engines.tp, config.engines.ep), engine_dtype(model.hf, config.engines))
        sharing = divide(payload.tensors(), sources, readers, ranks=None if mesh.rank == 0 else [mesh.rank])
        files = of_run.files_of(config)
        self._lead: _Lead | None = None
        if mesh.rank == 0:
            store = of_run.opened(config, config.sync.timeout_s)
            store.claim()
            geometry = Geometry(sharing.tensors, tuple(sharing.shares[rank].slabs for rank in range(mesh.world)))
            self._lead = _Lead(config, model, client, store, geometry)
        self._deltas = config.sync.delta != "off"
        full_every = config.sync.store.full_every if self._deltas else 1
        self._writer = ShareWriter(sharing.tensors, sharing.shares[mesh.rank], VersionStore(files, ""), full_every=full_every)

    def close(self) -> None:
        if self._lead is not None:
            self._lead.announcer.part()

    def _publish(self, version: int, expected: Expected) -> Published:
        whole = False
        try:
            published = self._written_and_read(version, expected)
            whole = True
        finally:
            if not whole:
                self._writer.forget()  # what nobody could write, or read, is no base
        return published

    def _written_and_read(self, version: int, expected: Expected) -> Published:
        begin = time.perf_counter()
        shares = self._written()
        traffic = _traffic([one.size for one in shares]) if self._deltas else None
        if self._lead is None:
            self._outcome("")
            return Published(version, time.perf_counter() - begin, 0.0)
        pause_ms, failure = 0.0, "rank 0 has failed"
        try:
            self._lead.write(version, [one.objects for one in shares])
            pause_ms, failure = self._announced(self._lead, version, expected), ""
        except AsyncmoeError as error:
            failure = str(error)
            raise
        except Exception as error:
            failure = failing.in_one_line(error)
            raise
        finally:
            self._outcome(failure)
        published = Published(version, time.perf_counter() - begin, pause_ms, traffic)
        while not self._settling.wait(LOOK_S):
            if starving(self._config, self._client):
                log.warning("all engines that had version %d are gone; announcing it to those that are there now", version)
                self._announced(self._lead, version, expected)
        return published

    def _announced(self, lead: _Lead, version: int, expected: Expected) -> float:
        """Announce a version until engines serve it; return the longest pause in milliseconds. On rank 0."""
        while True:
            self._tried = time.monotonic()
            try:
                return lead.announcer.announce(version, lead.manifest, lead.lineage, expected)
            except AsyncmoeError as error:
                if not lead.announcer.changed():
                    raise
                log.warning("engines changed during version %d; announcing it to the current engines: %s", version, error)

    def _written(self) -> list[_Share]:
        """Write this rank's share; return what all ranks have written.

        Raises:
            WeightSyncError: a rank could not write; the same message on every rank.
        """
        told: dict[str, object] = {}
        try:
            told["objects"] = objects_to_json(self._writer.write(self._tensors))
            told["size"] = asdict(self._writer.size)
        except Exception as error:
            if not isinstance(error, AsyncmoeError):
                log.exception("writing a version")
            told["failure"] = f"{failing.in_one_line(error)} (trainer rank {self._rank} on {failing.where(self._model.mesh.device)})"
        self._sent.set()
        everyone = [json.loads(one) for one in in_turn(self._group, json.dumps(told).encode())]
        failures = [one["failure"] for one in everyone if "failure" in one]
        if failures:
            raise WeightSyncError(failures[0])
        return [_Share(objects_from_json(one["objects"]), ShareSize(**one["size"])) for one in everyone]

    def _outcome(self, failure: str) -> None:
        """Have every rank know rank 0's failure, if there is one. Collective; raises it on all others.

        Raises:
            WeightSyncError: rank 0 has failed.
        """
        told = in_turn(self._group, failure.encode()[: 1 << 12])[0].decode(errors="replace")
        if told and self._rank != 0:
            raise WeightSyncError(told)


@dataclass(frozen=True)
class _Share:
    """What a rank wrote of a version."""

    objects: tuple[StoredObject, ...]
    size: ShareSize


class _Lead:
    """Rank 0's part: manifests, announcements, and which versions stay."""

    def __init__(self, config: Config, model: Model, client: Client, store: VersionStore, geometry: Geometry) -> None:
        self._store, self._geometry = store, geometry
        self._retention = Retention(store, config.sync.store.keep, config.sync.store.grace_s, time.monotonic)
        self.announcer = Announcer(config, model, client, store)
        self.manifest = ""  # digest of the manifest of the version under way
        self.lineage = 0

    def write(self, version: int, parts: Sequence[tuple[StoredObject, ...]]) -> None:
        """Make the version exist, and delete what is not needed any more; no rank writes meanwhile."""
        self.lineage = self.announcer.lineage()
        self.manifest = publish(self._store, VersionId(self.lineage, version), self._geometry, parts)
        try:
            self._retention.prune()
        except AsyncmoeError as error:
            log.warning("old weight versions stay in %s: %s", self._store.files.shown, error)


def _traffic(sizes: Sequence[ShareSize]) -> Traffic:
    """Return what a version took, of which ranks wrote parts."""
    changes = [one.changed for one in sizes if one.changed is not None]
    elements = sum(one.elements for one in sizes)
    share = sum(changes) / max(1, elements) if len(changes) == len(sizes) else None
    return Traffic(sum(one.nbytes for one in sizes), share)


def in_turn(group: dist.ProcessGroup, mine: bytes) -> list[bytes]:
    """Return what each rank of a group gives. Collective over the group, which is over CPUs.

    Raises:
        WeightSyncError: a rank gives more than `_MOST_TOLD` bytes; on every rank.
    """
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    longest = max(int(size) for size in sizes)
    if longest > _MOST_TOLD:
        raise WeightSyncError(f"what a rank says of a version: got {longest} bytes, expected at most {_MOST_TOLD}")
    padded = torch.zeros(max(1, longest), dtype=torch.uint8)
    if mine:
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    every = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(every, padded, group=group)
    return [one.numpy()[: int(size)].tobytes() for one, size in zip(every, sizes, strict=True)]
