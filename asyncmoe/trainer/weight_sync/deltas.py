"""The deltas that a trainer rank sends to the engines of one meeting, and the decision between a delta and a full update."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, InvariantBroken
from asyncmoe.receiver import failing
from asyncmoe.receiver.channel import SideStream
from asyncmoe.receiver.delta_messages import LARGEST_SHARE, Coming, Offer, Portion
from asyncmoe.reshard import DeltaSender, Exchanger, Plan
from asyncmoe.reshard.delta_gpu import BaseMemory
from asyncmoe.reshard.gpu import nothing_to_give
from asyncmoe.trainer.weight_sync.publisher import Traffic

log = logging.getLogger(__name__)
_WORD = (1 << 64) - 1


class DeltaSource:
    """One rank's part of all updates of a meeting that may be deltas. Around each: `offer`, then `send`, then `commit` or `abandon`.

    Args:
        plan: the rank's part.
        tensors: the tensors to send, by the names of the plan's storages.
        memory: where what was sent last is kept, for tensors on a GPU.
        side: where to enqueue copies and kernels, if the tensors are on a GPU.

    Raises:
        OutOfDeviceMemory: the GPU has no room for what was sent last, or for two messages.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        memory: BaseMemory = "device",
        side: SideStream | None = None,
    ) -> None:
        # One thread: the trainer's step runs at the same time.
        self._sender = DeltaSender(
            plan,
            rank,
            threads=1,
            memory=memory,
            stream=side.stream.cuda_stream if side else 0,
            relieve=torch.cuda.empty_cache if side else nothing_to_give,
        )
        self._sender.bind(tensors)
        self._dense: dict[int, int] = {}
        for transfer in plan.transfers:
            if transfer.source == rank:
                self._dense[transfer.destination] = self._dense.get(transfer.destination, 0) + transfer.nbytes
        self._sure = False  # whether all engines hold the base
        self._is_full = False

    def offer(self, version: int) -> Offer:
        """Code what changed since the version that all engines hold, or, if there is none or too much changed, offer everything."""
        sender = self._sender
        size, base = None, sender.base
        if self._sure and base is not None and base != version:
            size = sender.encode(version, limit_bytes=int(LARGEST_SHARE * sender.base_bytes))
        self._is_full = size is None
        if size is None:
            sender.full(version)
            return Offer(parts={rank: Portion(dense, (), sender.contribution(rank)) for rank, dense in self._dense.items()})
        parts = {
            rank: Portion(dense, tuple(len(message) for message in sender.messages(rank)), sender.contribution(rank))
            for rank, dense in self._dense.items()
        }
        return Offer(base=base, parts=parts, changed=size.changed, elements=size.elements)

    def send(self, exchanger: Exchanger, version: int, base: int | None, timeout_s: float) -> None:
        """Send this rank's part of an update that was offered: of a delta, or, without `base`, of a full update.

        Raises:
            TransferError, WaitTimeout: as `Exchanger.run`.
        """
        if base is not None:
            exchanger.carry({rank: self._sender.messages(rank) for rank in self._dense}, {}, _refuse, timeout_s)
            return
        if not self._is_full:
            self._sender.abandon()
            self._sender.full(version)
            self._is_full = True
        exchanger.run(timeout_s)

    def commit(self) -> None:
        """Take the version as the next base: every engine serves it. Where that fails, there is no base, and the next update is full.

        Raises nothing: for the other ranks the version is published. A device that does not work fails the next `offer`.
        """
        try:
            self._sender.commit()
            self._sure = True
        except Exception as error:
            log.warning("the next update is full: %s", failing.in_one_line(error), exc_info=not isinstance(error, AsyncmoeError))
            self.abandon()

    def abandon(self) -> None:
        """Forget the version, of which an engine may or may not have something: the next update is full."""
        self._sender.abandon()
        self._sure = False


def common_base(offers: Mapping[int, Offer]) -> int | None:
    """Return the version of which an update is sent as a delta; None: it is sent in full.

    Args:
        offers: of all trainer ranks.
    """
    bases = {one.base for one in offers.values()}
    if len(bases) != 1:
        return None
    coded: dict[int, int] = {}
    dense: dict[int, int] = {}
    for one in offers.values():
        for rank, part in one.parts.items():
            coded[rank] = coded.get(rank, 0) + sum(part.sizes)
            dense[rank] = dense.get(rank, 0) + part.dense
    fits = all(nbytes <= int(LARGEST_SHARE * dense[rank]) for rank, nbytes in coded.items())
    return bases.pop() if fits else None


def comings(offers: Mapping[int, Offer], engine_ranks: Iterable[int], base: int | None) -> dict[int, Coming]:
    """Return what each engine rank gets, by rank.

    Args:
        offers: of all trainer ranks, by rank.
        base: as `common_base` returned it.
    """
    found = {}
    for rank in engine_ranks:
        parts = {source: one.parts[rank] for source, one in offers.items() if rank in one.parts}
        sizes = {source: part.sizes for source, part in parts.items()} if base is not None else {}
        found[rank] = Coming(sizes, sum(part.contribution for part in parts.values()) & _WORD)
    return found


def traffic(offers: Mapping[int, Offer], base: int | None) -> Traffic:
    """Return what an update takes; for the arguments see `comings`."""
    parts = [part for one in offers.values() for part in one.parts.values()]
    if base is None:
        return Traffic(sum(part.dense for part in parts))
    elements = sum(one.elements for one in offers.values())
    nbytes = sum(sum(part.sizes) for part in parts)
    return Traffic(nbytes, sum(one.changed for one in offers.values()) / max(1, elements))


def unsupported(config: Config) -> str:
    """Return why the updates of a run cannot be deltas although `sync.delta` asks for them; empty if they can, or if it does not ask."""
    if config.sync.delta == "off":
        return ""
    reasons = {
        f"sync.method is {config.sync.method}": config.sync.method != "reshard",
        "adapters are sent whole": config.adapter is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _refuse(source: int, message: object) -> None:
    raise InvariantBroken(f"got a message from rank {source}, expected none: a trainer rank only sends")
