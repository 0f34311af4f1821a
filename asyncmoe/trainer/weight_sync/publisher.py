"""What both ways of publishing weights have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncmoe.errors import WeightSyncError
from asyncmoe.rpc.messages import Engines

Checksums = tuple[dict[str, str], ...]
"""For each rank of an engine {SGLang parameter: checksum}."""

Verifier = Callable[[Mapping[str, torch.Tensor], str], Checksums]
"""Makes the checksums that engines should report, from the whole Hugging Face checkpoint {name: tensor} and the engines' device."""
Expected = Callable[[str], Checksums]
"""Makes the checksums that engines on a device ("cpu", "cuda") should report; of a version that is not verified none."""


def unverified(device: str) -> Checksums:
    """`Expected` of a version that is not verified."""
    return ()


def device_of(engines: Engines) -> str:
    """What the engines say they compute on, of engines that were asked; empty where they were not.

    Raises:
        WeightSyncError: they say different things.
    """
    said = {engine.device for engine in engines.engines}
    if len(said) > 1:
        listed = ", ".join(f"{engine.name} {engine.device}" for engine in engines.engines)
        raise WeightSyncError(f"sync.verify_every: got engines on different devices ({listed}), expected one kind; set it to 0")
    return next(iter(said), "")


@dataclass(frozen=True)
class Published:
    """What publishing a version cost.

    Attributes:
        seconds: from `begin` until every engine served it.
        pause_ms: the longest any engine stood still; 0 on ranks other than 0.
    """

    version: int
    seconds: float
    pause_ms: float


class Publisher(Protocol):
    """The sender of one trainer; every call is a collective over its ranks. One version at a time: `begin`, then `settle`."""

    def begin(self, version: int) -> None:
        """Start to publish the weights as they are. They must not change until `wait_sent` has returned."""

    def check(self) -> None:
        """Raise what has gone wrong with the version under way; does not wait."""

    def wait_sent(self) -> None:
        """Return when the weights may change: all that this rank sends of the version under way is out of them."""

    def settle(self) -> Published | None:
        """Return when every engine serves the version under way; None when there is none.

        Raises:
            WeightSyncError: with the same words on every rank.
        """

    def close(self) -> None:
        """Leave the weight group."""


class AtOnce:
    """A `Publisher` whose `begin` does it all: when it returns, every engine serves the version and nothing is left to wait for."""

    def __init__(self) -> None:
        self._published: Published | None = None

    def publish(self, version: int) -> Published:
        """Make `version` what all engines serve."""
        raise NotImplementedError

    def begin(self, version: int) -> None:
        self._published = self.publish(version)

    def check(self) -> None:
        pass

    def wait_sent(self) -> None:
        pass

    def settle(self) -> Published | None:
        published, self._published = self._published, None
        return published

    def close(self) -> None:
        pass
