"""The checksums SGLang's `/weights_checker` should report for the trainer's current weights.

Every trainer rank assembles a share of an engine's parameters from all ranks' shards, a bucket at a time, and hashes it, so that no rank
needs memory for more than a bucket, however large the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch

from asyncmoe.config import Config
from asyncmoe.models import engine_dtype, engine_parallel
from asyncmoe.models.payload import Payload
from asyncmoe.platform import collectives
from asyncmoe.platform.float8 import dequantised
from asyncmoe.reshard import Plan, RankLayout, exchange, plan_each
from asyncmoe.reshard.bucket import grouped
from asyncmoe.reshard.checksum import engine_checksums
from asyncmoe.reshard.float8 import SCALES
from asyncmoe.reshard.layout import Storage
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.weights.sender.publisher import Checksums
from asyncmoe.weights.sender.sources import WeightSources, empty
from asyncmoe.weights.sender.trained import TrainedModel

HashedPart = tuple[int, RankLayout]
"""The number of an engine's rank, from 0, and the layout of the parameters there that this trainer rank hashes."""


class ExpectedChecksums:
    """Hashes the weights of every version that must be verified. Every rank creates its own object.

    Adapters are not verified, because SGLang has no checksums for their memory; nor are engines that quantise weights as they load them.
    """

    def __init__(self, config: Config, model: TrainedModel) -> None:
        self.config, self.model, self._mesh = config, model, model.mesh
        unknown = model.adapter is not None or config.engines.quantises
        self._every = 0 if unknown else config.sync.verify_every
        self._versions = 0
        self._files: Checksums | None = None
        self.of_loaded = config.sync.verify_every > 0 and not config.engines.quantises and Payload(model.hf).float8 is None

    def of_files(self) -> Checksums:
        """Return the expected checksums of engines that have loaded the model's files; call it before the first `of_next`, while the
        trainer still has these weights (apart from adapters). Collective, with the result on rank 0, as `of_next`."""
        if self._files is None:
            self._files = self._computed()
        return self._files

    def of_next(self) -> Checksums:
        """Return the checksums of the current weights if their version must be verified: the first version, and every
        `sync.verify_every`-th after it. Collective over all ranks, once for each version.

        The engines' devices must be of the trainer's kind, because SGLang uses a different hash on a GPU.

        Returns:
            The checksums on rank 0; nothing on the other ranks.
        """
        self._versions += 1
        known, self._files = self._files, None
        if not self._every or (self._versions - 1) % self._every:
            return ()
        return self._computed() if known is None else known

    def _computed(self) -> Checksums:
        self._sources.refresh()
        found: list[tuple[int, dict[str, str]]] = []
        transport = TorchTransport(device=str(self._mesh.device))
        for plan, share in self._rounds:
            held = {} if share is None else empty(share[1].storages, self._mesh.device)
            exchange(plan, transport, self._sources.tensors, held, timeout_s=self.config.sync.timeout_s)
            if share is not None:
                found.append((share[0], self._hashed(held, self._served[share[0]])))
        everyone = collectives.gathered(found)
        if everyone is None:
            return ()
        whole: list[dict[str, str]] = [{} for _ in self._served]
        for rank, checksums in (one for each in everyone for one in each):
            whole[rank] |= checksums
        return tuple(whole)

    @cached_property
    def _sources(self) -> WeightSources:
        return WeightSources(self.model, moves=self.config.in_turn)

    @cached_property
    def _served(self) -> list[Mapping[str, Storage]]:
        """The parameters of every rank of an engine, in the engine's dtypes."""
        return [layout.storages for layout in self._engine(engine_dtype(self.model.hf, self.config.engines))]

    @cached_property
    def _rounds(self) -> list[tuple[Plan, HashedPart | None]]:
        """The exchanges that assemble an engine's parameters, and this rank's share of each.

        They are assembled in the trainer's dtype and cast by PyTorch, so that the checksums do not depend on the casts of
        `asyncmoe.reshard`.
        """
        model, dtype = self.model, str(self.model.dtype).removeprefix("torch.")
        rounds = list(shared_out(self._engine(dtype), self._mesh.world, self.config.sync.bucket_bytes))
        payload = Payload(model.hf)
        destinations = [[layout for _, layout in shares] for shares in rounds]
        plans = plan_each(payload.tensors(), payload.trainer(model.parallel, dtype), destinations, ranks=[self._mesh.rank])
        mine = [shares[self._mesh.rank] if self._mesh.rank < len(shares) else None for shares in rounds]
        return list(zip(plans, mine, strict=True))

    def _engine(self, dtype: str) -> list[RankLayout]:
        return Payload(self.model.hf).engines(engine_parallel(self.config), dtype)

    def _hashed(self, held: Mapping[str, torch.Tensor], served: Mapping[str, Storage]) -> dict[str, str]:
        values = {name: tensor.cpu().to(getattr(torch, served[name].dtype)) for name, tensor in held.items()}
        for name in [name for name in values if name + SCALES in values]:
            # SGLang hashes the dequantised values, in bfloat16 (utils/weight_checker_comparator.py, Fp8BlockComparable).
            values[name] = dequantised(values[name], values.pop(name + SCALES), torch.bfloat16)
        return engine_checksums(values, self._mesh.device.type)


def shared_out(engine: Sequence[RankLayout], world: int, bucket_bytes: int) -> Iterator[list[HashedPart]]:
    """Yield rounds in which each of `world` trainer ranks, from 0, gets at most one share; every parameter is in exactly one share.

    Args:
        engine: the layouts of an engine's ranks.
        bucket_bytes: maximum size of a share, unless the share is a single parameter with its scales, if any.
    """
    groups = [(rank, names) for rank, layout in enumerate(engine) for names in grouped(_with_scales(layout.storages), bucket_bytes)]
    of_rank = [layout.pieces_by_storage for layout in engine]
    for first in range(0, len(groups), world):
        shares = []
        for at, (rank, names) in enumerate(groups[first : first + world]):
            pieces = tuple(piece for name in names for piece in of_rank[rank][name])
            shares.append((rank, RankLayout(at, {name: engine[rank].storages[name] for name in names}, pieces)))
        yield shares


def _with_scales(storages: Mapping[str, Storage]) -> Iterator[tuple[list[str], int]]:
    """Yield each storage with its scales, if any, as (names, total bytes)."""
    for name in (name for name in storages if not (name.endswith(SCALES) and name.removesuffix(SCALES) in storages)):
        names = [one for one in (name, name + SCALES) if one in storages]
        yield names, sum(storages[one].nbytes for one in names)
