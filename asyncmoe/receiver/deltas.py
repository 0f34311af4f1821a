"""The deltas of a worker: takes their coded bytes while it generates, proves them, and writes them between two forward passes.

`asyncmoe.reshard.delta_receiver` does the work; this file says when, and what is expected of a version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from asyncmoe.errors import InvariantBroken, TransferError, WeightSyncError
from asyncmoe.receiver import failing
from asyncmoe.receiver.channel import SideStream
from asyncmoe.receiver.delta_messages import LARGEST_SHARE, Coming
from asyncmoe.receiver.protocol import Header, Terms
from asyncmoe.reshard import DeltaReceiver, Exchanger, Plan, expected_digest
from asyncmoe.reshard.gpu import nothing_to_give

log = logging.getLogger(__name__)


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
        self._plan, self._rank, self._terms = plan, rank, terms
        dense = sum(transfer.nbytes for transfer in plan.transfers if transfer.destination == rank)
        # One thread: the engine generates at the same time.
        self._held = DeltaReceiver(
            plan,
            rank,
            limit_bytes=int(LARGEST_SHARE * dense),
            threads=1,
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
        self._held.adopt(version, expected_digest(self._plan, self._rank, [coming.contributions]))

    def receive(self, exchanger: Exchanger, header: Header, coming: Coming) -> None:
        """Receive a delta and prove that it makes its version of what lies in memory now. Writes nothing.

        Raises:
            DeltaRefused: it does not, or it is damaged, too large, or made from another version than the one held.
            TransferError, WaitTimeout: as `Exchanger.carry`.
        """
        held, most, total = self._held, self._held.limit_bytes, sum(map(sum, coming.sizes.values()))
        held.abandon()
        if header.base != held.version:
            raise DeltaRefused(f"a delta of version {header.base} came, but this rank holds {_named(held.version)}")
        if total > most:
            raise DeltaRefused(f"a delta of {total} bytes came, expected at most {most}")
        exchanger.carry({}, coming.sizes, self._stage, self._terms.timeout_s)
        with self._refusing():
            held.prove(header.version)
            expected = expected_digest(self._plan, self._rank, [coming.contributions])
            if held.staged_digest != expected:
                raise DeltaRefused(f"the delta makes digest {held.staged_digest:016x}, but its senders have {expected:016x}")

    def commit(self, version: int) -> None:
        """Write the delta that was received into the arrays.

        Raises:
            TransferError: memory changed since it was proven: it may be partly written, and the worker must not continue.
        """
        self._held.commit(version)

    def moved(self, arrays: dict[str, torch.Tensor]) -> None:
        """Go on with other arrays that hold the same, as a swap leaves them."""
        self._held.rebind(arrays)

    def _stage(self, source: int, message: np.ndarray) -> None:
        with self._refusing():
            self._held.stage(source, message, owned=True)  # the carrier made it for this rank

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except TransferError as error:
            raise DeltaRefused(failing.in_words(error, self._terms)) from error
        except InvariantBroken as error:  # of other messages than the plan has
            raise DeltaRefused(str(error)) from error


def _named(version: int | None) -> str:
    return "no version that it has proven" if version is None else f"version {version}"
