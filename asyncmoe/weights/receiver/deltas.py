"""A worker's deltas: the verified version in its memory, and the delta encoded against it (`asyncmoe.reshard.delta_decoder`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncmoe.errors import TransferError, WeightSyncError
from asyncmoe.reshard import DeltaDecoder, Exchanger
from asyncmoe.weights.protocol import Coming, Header, Terms
from asyncmoe.weights.receiver import failing


class DeltaRefused(WeightSyncError):
    """A delta, or the memory that it would change, is in doubt. Nothing was written; a full update may succeed."""


def receive(held: DeltaDecoder, exchanger: Exchanger, header: Header, coming: Coming, terms: Terms) -> None:
    """Receive a delta and verify that it turns the current memory into its version. Writes nothing.

    Raises:
        DeltaRefused: verification failed, the delta is damaged, its base is not this rank's version, or there is no memory for it.
        TransferError, WaitTimeout: as `Exchanger.run`.
    """
    if header.base != held.version:
        whose = "no verified version" if held.version is None else f"version {held.version}"
        raise DeltaRefused(f"got a delta of version {header.base}, but this rank has {whose}")
    with _refusing(terms):
        held.expect(coming.sizes)
    exchanger.run(terms.timeout_s, decoder=held)
    with _refusing(terms):
        held.prove(coming.digests)


@contextmanager
def _refusing(terms: Terms) -> Iterator[None]:
    try:
        yield
    except TransferError as error:
        raise DeltaRefused(failing.in_words(error, terms)) from error
