"""Megatron's shards gathered to rank 0 in Hugging Face's form, one bounded bucket at a time.

What weight sync over `broadcast` and the export of a checkpoint have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from asyncmoe.reshard import exchange, plan
from asyncmoe.reshard.bucket import Bucket, buckets
from asyncmoe.reshard.exchange import Transport
from asyncmoe.reshard.layout import Piece, RankLayout
from asyncmoe.reshard.plan import Plan


class Gatherer:
    """Plans once, then gathers the current weights as often as asked.

    Args:
        tensors: shape of every canonical tensor.
        megatron: layout of every trainer rank.
        huggingface: layout of the Hugging Face checkpoint; its storages are what a bucket holds.
        bucket_bytes: upper bound of a bucket; one larger tensor gets a bucket of its own.
        transport: between the trainer's ranks.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]],
        megatron: Sequence[RankLayout],
        huggingface: RankLayout,
        bucket_bytes: int,
        transport: Transport,
        timeout_s: float,
    ) -> None:
        self._transport, self._timeout_s = transport, timeout_s
        self.buckets: list[Bucket] = buckets(huggingface, bucket_bytes)
        pieces = [_by_tensor(layout) for layout in megatron]
        self._plans = [_plan_of(bucket, tensors, megatron, pieces) for bucket in self.buckets]

    def run(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
        """Collective over all trainer ranks: each bucket with its bytes (uint8, on rank 0; None elsewhere), in a fixed order.

        Args:
            parameters: this rank's storages by local Megatron name.
        """
        for bucket, bucket_plan in zip(self.buckets, self._plans, strict=True):
            flat = np.empty(bucket.nbytes, dtype=np.uint8) if self._transport.rank == 0 else None
            destination = None if flat is None else {"bucket": flat}
            exchange(bucket_plan, self._transport, parameters, destination, timeout_s=self._timeout_s)
            yield bucket, None if flat is None else torch.from_numpy(flat)


def _by_tensor(layout: RankLayout) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in layout.pieces:
        found[piece.tensor].append(piece)
    return found


def _plan_of(
    bucket: Bucket, tensors: Mapping[str, tuple[int, ...]], megatron: Sequence[RankLayout], pieces: Sequence[Mapping[str, list[Piece]]]
) -> Plan:
    wanted = sorted({piece.tensor for piece in bucket.layout.pieces})
    source = []
    for layout, mine in zip(megatron, pieces, strict=True):
        kept = tuple(piece for name in wanted for piece in mine.get(name, ()))
        storages = {piece.storage: layout.storages[piece.storage] for piece in kept}
        source.append(RankLayout(layout.rank, storages, kept))
    return plan({name: tensors[name] for name in wanted}, source, [bucket.layout])
