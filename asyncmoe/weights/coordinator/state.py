"""The phases of a weight update. Pure: nothing here waits or communicates.

    ARRIVING   the engines generate; their receivers stage the version in separate memory
    PAUSED     the gate is closed; every engine is paused, or is about to be, and has one whole version
    LOADING    the same, but an engine may have part of the new version

    claim --> ARRIVING --pause--> PAUSED --load--> LOADING --load--> LOADING
                 |                  |                 |
             forgotten        engines resume    engines fenced       if the update ends without a commit

One update is open at a time. A new update replaces it only while it is ARRIVING, because a lost sender may have left it behind. A commit
has no phase of its own, because an engine that fails in it is fenced, whatever the phase. An update is concluded once, by its commit or by
another ending, and stays open until that has finished.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from asyncmoe.errors import InvariantBroken, WeightSyncError


class UpdatePhase(IntEnum):
    """See the module's docstring; an update's phase never decreases."""

    ARRIVING = 0
    PAUSED = 1
    LOADING = 2


@dataclass(frozen=True)
class UpdateState:
    """An open update.

    Attributes:
        version: the version that the engines will serve.
        staged: True if the version arrives through the receivers, False if in buckets.
        concluding: whether its commit, or another ending, has begun.
    """

    version: int
    staged: bool = False
    phase: UpdatePhase = UpdatePhase.ARRIVING
    concluding: bool = False

    @property
    def gate_closed(self) -> bool:
        """Whether no request may enter an engine."""
        return self.phase >= UpdatePhase.PAUSED


def claim(current: UpdateState | None, version: int, staged: bool = False) -> UpdateState:
    """Open an update to `version`.

    Args:
        current: the update that is open now, if any.

    Raises:
        WeightSyncError: `current` has paused engines, or is being concluded.
    """
    if current is not None and (current.gate_closed or current.concluding):
        raise WeightSyncError(f"cannot begin version {version}: version {current.version} is still open")
    return UpdateState(version, staged)


def expect(current: UpdateState | None, version: int) -> UpdateState:
    """Return the open update, which must be to `version`.

    Raises:
        WeightSyncError: no update is open, or another is.
    """
    if current is None or current.version != version:
        found = "none" if current is None else f"version {current.version}"
        raise WeightSyncError(f"version {version} is not open (open: {found})")
    return current


def pause(update: UpdateState) -> UpdateState:
    """Close the gate and pause the engines.

    Raises:
        InvariantBroken: they are paused already.
    """
    if update.gate_closed:
        raise InvariantBroken(f"version {update.version}: its engines are paused already")
    return replace(update, phase=UpdatePhase.PAUSED)


def load(update: UpdateState) -> UpdateState:
    """Let the engines write their weights.

    Raises:
        InvariantBroken: they still generate.
    """
    if not update.gate_closed:
        raise InvariantBroken(f"version {update.version}: its engines are not paused")
    return replace(update, phase=UpdatePhase.LOADING)


def load_bucket(update: UpdateState) -> UpdateState:
    """Let the engines load a bucket.

    Raises:
        WeightSyncError: the version arrives through the receivers.
    """
    if update.staged:
        raise WeightSyncError(f"version {update.version} is staged by the receivers; it takes no buckets")
    return load(update)


def conclude(update: UpdateState) -> UpdateState:
    """Begin the commit, or another ending.

    Raises:
        WeightSyncError: it has begun already.
    """
    if update.concluding:
        raise WeightSyncError(f"version {update.version} is being concluded already")
    return replace(update, concluding=True)
