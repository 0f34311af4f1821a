"""A trainer rank's deltas for the engines of one meeting, and the choice between a delta and a full update."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from asyncmoe.config import Config
from asyncmoe.errors import OutOfDeviceMemory
from asyncmoe.reshard import DeltaEncoder, Plan
from asyncmoe.weights.protocol import Coming, Offer, Portion
from asyncmoe.weights.receiver.channel import HOST, SideStream
from asyncmoe.weights.sender.publisher import Traffic

log = logging.getLogger(__name__)
LARGEST_SHARE = 0.5
"""Largest size of a delta, as a share of a full update's bytes, for any engine rank; above it, the update is full."""


def encoder_of(plan: Plan, rank: int, tensors: Mapping[str, torch.Tensor], bucket_bytes: int, side: SideStream = HOST) -> DeltaEncoder:
    """Return an encoder for a rank's part of all updates in a meeting with deltas.

    Args:
        plan: the rank's part of the plan.
        tensors: the tensors to send, by the names of the plan's storages.
        side: where to enqueue copies and kernels.

    Raises:
        OutOfDeviceMemory: the GPU has no room for a copy of what was last sent, or for two messages.
    """
    encoder = DeltaEncoder(
        plan,
        rank,
        bucket_bytes=bucket_bytes,
        threads=1,  # the trainer's step runs at the same time
        stream=side.handle,
        relieve=side.relieve,
    )
    encoder.bind(tensors)
    return encoder


def offer(encoder: DeltaEncoder, plan: Plan, version: int) -> Offer:
    """Encode the changes since the version that all engines have; without such a version, or if too much changed, offer everything."""
    base, size = encoder.base, None
    if base is not None and base != version:
        try:
            size = encoder.encode(version, limit_bytes=int(LARGEST_SHARE * encoder.base_bytes))
        except (MemoryError, OutOfDeviceMemory) as error:
            log.warning("version %d is sent in full: no memory for its delta: %s", version, error)
            encoder.forget()
    if size is None:
        encoder.full(version)
    mine = [(one.destination, one.nbytes) for one in plan.transfers if one.source == encoder.rank]
    parts = {rank: Portion(nbytes, encoder.sizes(rank), encoder.digest(rank)) for rank, nbytes in mine}
    return Offer(parts=parts) if size is None else Offer(base=base, parts=parts, changed=size.changed, elements=size.elements)


def common_base(offers: Mapping[int, Offer]) -> int | None:
    """Return the base version of a delta update, or None if the update is sent in full.

    Args:
        offers: offers of all trainer ranks.
    """
    bases = {one.base for one in offers.values()}
    if len(bases) != 1:
        return None
    coded, dense = Counter[int](), Counter[int]()
    for one in offers.values():
        for rank, part in one.parts.items():
            coded[rank] += sum(part.sizes)
            dense[rank] += part.dense
    fits = all(nbytes <= int(LARGEST_SHARE * dense[rank]) for rank, nbytes in coded.items())
    return bases.pop() if fits else None


def comings(offers: Mapping[int, Offer], engine_ranks: Iterable[int], base: int | None) -> dict[int, Coming]:
    """Return the data that each engine rank will receive, by rank.

    Args:
        offers: offers of all trainer ranks, by rank.
        base: the result of `common_base`.
    """
    found = {}
    for rank in engine_ranks:
        parts = {source: one.parts[rank] for source, one in offers.items() if rank in one.parts}
        sizes = {source: part.sizes for source, part in parts.items()} if base is not None else {}
        found[rank] = Coming(sizes, {source: part.digest for source, part in parts.items()})
    return found


def traffic(offers: Mapping[int, Offer], base: int | None) -> Traffic:
    """Return the traffic of an update; arguments as for `comings`."""
    parts = [part for one in offers.values() for part in one.parts.values()]
    if base is None:
        return Traffic(sum(part.dense for part in parts))
    elements = sum(one.elements for one in offers.values())
    nbytes = sum(sum(part.sizes) for part in parts)
    return Traffic(nbytes, sum(one.changed for one in offers.values()) / max(1, elements))


def unsupported(config: Config) -> str:
    """Return why a run's updates cannot be deltas although `sync.delta` asks for them; empty if they can, or if it does not ask."""
    if config.sync.delta == "off":
        return ""
    reasons = {
        f"sync.method is {config.sync.method}": config.sync.method != "reshard",
        "adapters are sent whole": config.adapter is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
