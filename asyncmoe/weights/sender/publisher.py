"""The interface of all publishers of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Checksums = tuple[dict[str, str], ...]
"""One {SGLang parameter: checksum} for each rank of an engine; empty: the version is not verified."""


@dataclass(frozen=True)
class Traffic:
    """The data volume of an update.

    Attributes:
        nbytes: bytes that all trainer ranks sent to all engine ranks.
        changed: share of the elements whose stored bits changed since the previous version; None: not measured in a full update.
    """

    nbytes: int
    changed: float | None = None


@dataclass(frozen=True)
class Published:
    """The cost of publishing a version.

    Attributes:
        seconds: from the start of the last attempt until every engine served the version.
        pause_ms: the longest pause of any engine, on rank 0; 0 on all other ranks.
        traffic: traffic to the engines, on rank 0 of a run whose updates may be deltas; else None.
    """

    version: int
    seconds: float
    pause_ms: float
    traffic: Traffic | None = None


class Publisher:
    """Publishes a trainer's weights. Every call is collective over the trainer's ranks. One version at a time: `begin`, then `settle`.

    The base class suits publishers whose `begin` returns only when every engine serves the version; they implement `publish`.

    Attributes:
        copies: tensors on this rank's device that hold nothing between `settle` and `begin`.
    """

    copies: Sequence[torch.Tensor] = ()
    _published: Published | None = None

    def publish(self, version: int) -> Published:
        """Publish `version`; return when all engines serve it."""
        raise NotImplementedError

    def begin(self, version: int) -> None:
        """Start publishing the current weights. They must not change until `wait_sent` has returned."""
        self._published = self.publish(version)

    def check(self) -> None:
        """Raise the error of the version being published, if it has failed; do not wait."""

    def starving(self) -> bool:
        """Return whether no engine generates because all lack a version. Call it on rank 0 while nothing is sent."""
        return False

    def wait_sent(self) -> None:
        """Wait until the weights may change: this rank has sent its part of the version."""

    def settle(self) -> Published | None:
        """Wait until every engine serves the version being published; return None if there is none.

        Raises:
            WeightSyncError: with the same message on every rank.
        """
        published, self._published = self._published, None
        return published

    def close(self) -> None:
        """Disconnect from the engines and release resources."""
