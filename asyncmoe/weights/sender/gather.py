"""Gather Megatron's shards to rank 0 as whole tensors, one bounded bucket at a time.

Used by the `broadcast` and `disk` publishers, and by export.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncmoe.models.payload import Payload
from asyncmoe.models.quantised import without
from asyncmoe.reshard import Bucket, buckets, exchange, plan_each
from asyncmoe.reshard.bucket import STORAGE
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.weights.sender.sources import WeightSources, empty
from asyncmoe.weights.sender.trained import TrainedModel


class Gatherer:
    """Plans once; every `run` gathers the current values.

    Args:
        model: this rank's part; every rank creates its own gatherer.
        adapter: gather the adapter's halves under their canonical names, instead of the weights under Hugging Face's names.
        quantised: for a float8 model, gather quantised weights with their scales, as the engines load them.
        bucket_bytes: upper bound of a bucket; a larger tensor gets its own bucket.
        timeout_s: seconds that a rank waits for another.
    """

    def __init__(self, model: TrainedModel, bucket_bytes: int, timeout_s: float, *, adapter: bool = False, quantised: bool = False) -> None:
        kind = model.adapter if adapter else None
        payload = Payload(model.hf if quantised else without(model.hf), kind)
        dtype = str(model.dtype).removeprefix("torch.")
        self._model, self._timeout_s, self.quantised = model, timeout_s, quantised
        self._sources = None if adapter else WeightSources(model)
        self._transport = TorchTransport(device=str(model.mesh.device))
        self.buckets: list[Bucket] = buckets(payload.whole(dtype), bucket_bytes, payload.glued())
        megatron = payload.trainer(model.parallel, dtype)
        self._plans = plan_each(payload.tensors(), megatron, [[bucket.layout] for bucket in self.buckets], ranks=[model.mesh.rank])

    def run(self) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
        """Yield each bucket with its flat tensor (rank 0) or None (other ranks), in a fixed order. Collective over all trainer ranks."""
        if self._sources is None:
            mine = self._model.adapter_values()
        else:
            self._sources.refresh()
            mine = self._sources.tensors
        for bucket, plan in zip(self.buckets, self._plans, strict=True):
            held = empty(bucket.layout.storages, self._model.mesh.device) if self._model.mesh.rank == 0 else {}
            exchange(plan, self._transport, mine, held, timeout_s=self._timeout_s)
            yield bucket, held.get(STORAGE)


def tensors_in(bucket: Bucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of a bucket's tensors, by name."""
    sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
    parts = torch.split(flat, sizes)
    return {name: part.view(shape) for name, shape, part in zip(bucket.names, bucket.shapes, parts, strict=True)}
