"""What both ways of publishing weights have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Checksums = tuple[dict[str, str], ...]
"""For each rank of an engine {SGLang parameter: checksum}."""


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
