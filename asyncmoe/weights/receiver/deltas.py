"""The deltas of a worker: what it is proved to hold, and what is coded against it (`asyncmoe.reshard.delta_decoder` does the work)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncmoe.errors import TransferError, WeightSyncError
from asyncmoe.reshard import DeltaDecoder, Exchanger, Plan
from asyncmoe.reshard.gpu import nothing_to_give
from asyncmoe.weights.protocol import Header, Terms
from asyncmoe.weights.receiver import failing
from asyncmoe.weights.receiver.channel import SideStream
from asyncmoe.weights.receiver.delta_messages import Coming


class DeltaRefused(WeightSyncError):
    """A delta, or the memory that it would change, is in doubt. Nothing was written; a full update may succeed."""


class DeltaStaging:
    """What a worker knows of the version it holds, and the coded delta of the next.

    Its receiver's thread calls everything but `commit` and `moved`, which its main thread calls while nothing is received.

    Args:
        plan: the rank's part.
        side: where to enqueue copies and kernels, if the weights are on a GPU. Around `commit` the caller waits for all of its streams.
    """

    def __init__(self, plan: Plan, rank: int, terms: Terms, side: SideStream | None = None) -> None:
        self._terms = terms
        self._held = DeltaDecoder(
            plan,
            rank,
            bucket_bytes=terms.bucket_bytes,
            threads=1,  # the engine generates at the same time
            stream=side.stream.cuda_stream if side else 0,
            relieve=torch.cuda.empty_cache if side else nothing_to_give,
        )

    def forget(self) -> None:
        """Hold no version: before a full update writes, and when one that was received will not be committed."""
        self._held.forget()

    def adopt(self, arrays: dict[str, torch.Tensor], version: int, coming: Coming) -> None:
        """Prove that a full update has brought a version whole, and remember it. Reads all of the arrays.

        Args:
            arrays: what was received into; if they are no parameters yet, `moved` follows.

        Raises:
            TransferError: they hold something else.
        """
        self._held.bind(arrays)
        self._held.adopt(version, coming.digests)

    def receive(self, exchanger: Exchanger, header: Header, coming: Coming) -> None:
        """Receive a delta and prove that it makes its version of what lies in memory now. Writes nothing.

        Raises:
            DeltaRefused: it does not, or it is damaged, too large, or made from another version than the one held.
            TransferError, WaitTimeout: as `Exchanger.run`.
        """
        held = self._held
        if header.base != held.version:
            whose = "no version that it has proved" if held.version is None else f"version {held.version}"
            raise DeltaRefused(f"a delta of version {header.base} came, but this rank holds {whose}")
        with self._refusing():
            held.expect(coming.sizes)
        exchanger.run(self._terms.timeout_s, decoder=held)
        with self._refusing():
            held.prove(coming.digests)

    def commit(self, version: int) -> None:
        """Write the delta that was received into the arrays.

        Raises:
            TransferError: memory changed since it was proved: it may be partly written, and the worker must not continue.
        """
        self._held.commit(version)

    def moved(self, arrays: dict[str, torch.Tensor]) -> None:
        """Go on with other arrays that hold the same, as a swap leaves them."""
        self._held.bind(arrays)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except TransferError as error:
            raise DeltaRefused(failing.in_words(error, self._terms)) from error
