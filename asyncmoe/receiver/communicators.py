"""NCCL communicators between a trainer and its engines: one for each engine, kept from one meeting to the next.

One of an engine joins all ranks of the trainer, numbered as they are, and the engine's ranks after them. So which other engines there
are does not matter to it: one that joins has one communicator made, one that leaves has one ended, and nobody else's is touched. It
carries one exchange after the other; an exchange that fails takes all communicators of its ranks with it, because a peer that did not
notice may have sent what nobody took.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import torch

from asyncmoe.errors import TransferError
from asyncmoe.receiver.protocol import Agreed, EngineRanks, HeldCommunicator, Terms
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.nccl_transport import Communicator, Route, RoutedTransport, make_unique_id
from asyncmoe.reshard.transport import Watch, nothing_to_watch


def members(terms: Terms, engine: EngineRanks) -> dict[int, int]:
    """Rank in the meeting -> rank in the engine's communicator."""
    trainer = terms.engines[0].first
    ours = {rank: rank for rank in range(trainer)}
    return ours | {engine.first + tp: trainer + tp for tp in range(engine.tp)}


def agree(terms: Terms, held: Mapping[int, Mapping[str, HeldCommunicator]], unique_id: Callable[[], bytes]) -> dict[str, Agreed]:
    """By engine, the communicator that all its ranks hold, after equally many exchanges, or else a new one.

    A receiver that slept through an update has taken part in fewer than its senders, whose messages, if they were small, NCCL took from
    them all the same: they would be the first of the next update.

    Args:
        held: of every rank, engine -> the communicator it could go on with.
    """
    agreed = {}
    for engine in terms.engines:
        found = {held[rank].get(engine.name) for rank in members(terms, engine)}
        one = found.pop() if len(found) == 1 else None
        agreed[engine.name] = Agreed(one.id) if one else Agreed(secrets.token_hex(8), unique_id())
    return agreed


class Communicators:
    """Those of one process. One transport at a time uses them.

    Args:
        device: number of this process's GPU.
        library: of NCCL, where it is not the one that is found.
    """

    def __init__(self, device: int, *, gpu: Gpu | None = None, library: str | None = None) -> None:
        self._device, self._gpu, self._library = device, gpu, library
        self._open: dict[str, tuple[str, Communicator]] = {}  # engine -> its communicator and the id of that
        self._lent: RoutedTransport | None = None

    def held(self) -> dict[str, HeldCommunicator]:
        """Engine -> what is there and idle."""
        if self._lent is not None and not self._lent.ended:
            return {}
        return {engine: HeldCommunicator(name, one.runs) for engine, (name, one) in self._open.items() if not one.ended}

    def unique_id(self) -> bytes:
        """What a new communicator is made from, by all of its ranks.

        Raises:
            UserError: there is no usable NCCL.
        """
        return make_unique_id(self._library)

    def transport(
        self, rank: int, terms: Terms, agreed: Mapping[str, Agreed], stream: int, timeout_s: float, watch: Watch = nothing_to_watch
    ) -> RoutedTransport:
        """A transport over what was agreed on; what was not is ended, and what is new is made. When the transport ends, its communicators
        are held again.

        Args:
            watch: called twice a second while the others are waited for.

        Raises:
            UserError: there is no usable NCCL, or no such GPU.
            TransferError: NCCL failed.
            WaitTimeout: not all ranks were there in time.
        """
        self._gpu = gpu = self._gpu or Gpu(self._device, torch.cuda.empty_cache)
        mine = [engine for engine in terms.engines if rank in members(terms, engine)]
        wanted = {engine.name: agreed[engine.name].id for engine in mine}
        for stale in [name for name, (number, _) in self._open.items() if wanted.get(name) != number]:
            self._open.pop(stale)[1].abort()  # its other ranks may be gone
        routes = []
        for engine in mine:
            numbers = members(terms, engine)
            if engine.name not in self._open:
                made = self._make(gpu, rank, numbers, agreed[engine.name].unique_id, terms.max_ctas)
                self._open[engine.name] = agreed[engine.name].id, made
            routes.append(Route(self._open[engine.name][1], numbers))
        self._lent = RoutedTransport(rank, gpu, routes, stream=stream)
        self._lent.join(timeout_s, watch)
        return self._lent

    def close(self) -> None:
        """End all that is idle, and what is not."""
        busy = self._lent is not None and not self._lent.ended
        for _, one in self._open.values():
            if busy:
                one.abort()
            else:
                one.close()
        self._open.clear()

    def _make(self, gpu: Gpu, rank: int, numbers: Mapping[int, int], unique_id: bytes, ctas: int) -> Communicator:
        try:
            return Communicator(gpu, numbers[rank], len(numbers), unique_id, max_ctas=ctas, library=self._library)
        except RuntimeError as error:
            other = next(peer for peer in numbers if peer != rank)
            raise TransferError(rank, other, f"{error} (on {gpu.device})") from error
