"""NCCL communicators between a trainer and its engines: one for each engine, kept from one meeting to the next.

An engine's communicator contains all trainer ranks under their own numbers, followed by the engine's ranks. It does not depend on the
other engines: when an engine joins or leaves, its communicator is created or ended, and no other communicator is touched. A communicator
carries one exchange after another. A failed exchange ends all communicators of its ranks, because a peer that did not notice the failure
may have sent messages that no rank received.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import torch

from asyncmoe.errors import TransferError
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.nccl import Communicator, make_unique_id
from asyncmoe.reshard.nccl_transport import Route, RoutedTransport
from asyncmoe.reshard.transport import Watch, nothing_to_watch
from asyncmoe.weights.protocol import Agreed, EngineRanks, HeldCommunicator, Terms


def members(terms: Terms, engine: EngineRanks) -> dict[int, int]:
    """Return the members of an engine's communicator: rank in the meeting -> rank in the communicator."""
    trainer = terms.engines[0].first
    ours = {rank: rank for rank in range(trainer)}
    return ours | {engine.first + tp: trainer + tp for tp in range(engine.tp)}


def agree(terms: Terms, held: Mapping[int, Mapping[str, HeldCommunicator]], unique_id: Callable[[], bytes]) -> dict[str, Agreed]:
    """Choose each engine's communicator: the one all its ranks hold after the same number of exchanges, or else a new one.

    A receiver that was suspended during an update, or refused a delta, has run fewer exchanges than its senders. NCCL may have accepted
    the senders' small messages all the same, and would deliver them as the first messages of the next update.

    Args:
        held: rank -> engine -> the communicator the rank can reuse.
    """
    agreed = {}
    for engine in terms.engines:
        found = {held[rank].get(engine.name) for rank in members(terms, engine)}
        one = found.pop() if len(found) == 1 else None
        agreed[engine.name] = Agreed(one.id) if one else Agreed(secrets.token_hex(8), unique_id())
    return agreed


class Communicators:
    """The communicators of one process. One transport at a time uses them.

    Args:
        device: number of this process's GPU.
        library: path of NCCL; None: `find_nccl`.
    """

    def __init__(self, device: int, *, gpu: Gpu | None = None, library: str | None = None) -> None:
        self._device, self._gpu, self._library = device, gpu, library
        self._open: dict[str, tuple[str, Communicator]] = {}  # engine -> (id of its communicator, communicator)
        self._lent: RoutedTransport | None = None

    def held(self) -> dict[str, HeldCommunicator]:
        """Return the idle communicators, by engine."""
        if self._lent is not None and not self._lent.ended:
            return {}
        return {engine: HeldCommunicator(name, one.runs) for engine, (name, one) in self._open.items() if not one.ended}

    def unique_id(self) -> bytes:
        """Return an NCCL unique ID, from which all ranks create a new communicator.

        Raises:
            UserError: no usable NCCL was found.
        """
        return make_unique_id(self._library)

    def transport(
        self, rank: int, terms: Terms, agreed: Mapping[str, Agreed], stream: int, timeout_s: float, watch: Watch = nothing_to_watch
    ) -> RoutedTransport:
        """Return a transport over the agreed communicators. Create new ones and abort those not agreed on. When the transport ends after
        a successful exchange, its communicators are held again.

        Args:
            watch: called about every 0.25 s while waiting for the other ranks.

        Raises:
            UserError: no usable NCCL was found, or the GPU does not exist.
            TransferError: NCCL failed.
            WaitTimeout: not all ranks joined in time.
        """
        self._gpu = gpu = self._gpu or Gpu(self._device, torch.cuda.empty_cache)
        mine = [engine for engine in terms.engines if rank in members(terms, engine)]
        wanted = {engine.name: agreed[engine.name].id for engine in mine}
        for stale in [name for name, (number, _) in self._open.items() if wanted.get(name) != number]:
            self._open.pop(stale)[1].abort()  # not `close`: its other ranks may be gone
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
        """End all communicators; abort them if an exchange may be under way."""
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
