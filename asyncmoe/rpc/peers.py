"""Whether a process of another machine fits into the run: the same versions of what both use, and a clock that goes alike."""

from __future__ import annotations

import importlib.metadata
import math
import socket
import time
from collections.abc import Iterable

import msgspec

from asyncmoe.errors import UserError

ALIKE = ("asyncmoe", "torch", "megatron-core", "transformer-engine", "sglang", "transformers", "msgspec")
"""Packages whose versions are told to others, where they are installed."""


class Facts(msgspec.Struct, frozen=True):
    """What a process tells of itself when it joins."""

    host: str
    role: str
    """As it is called in the run: "trainer.3"."""
    versions: dict[str, str]
    """By package; without those it does not have."""
    time: float
    """Unix seconds of its clock as it said so."""

    @property
    def who(self) -> str:
        """What messages call it."""
        return f"{self.role} on {self.host}"


def facts(role: str, packages: Iterable[str] = ALIKE) -> Facts:
    """Of this process, now."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Facts(socket.gethostname(), role, found, time.time())


def check(ours: Facts, theirs: Facts, clock_s: float) -> None:
    """Refuse another process that does not fit into the run, by one line that names it, its node and the cure.

    Versions are compared of the packages that both have: the environments of engines and trainers differ. The clocks' difference includes
    the time the other's facts were under way.

    Args:
        ours: of the process that is joined, taken as the other's arrive.
        clock_s: seconds that two clocks may be apart.

    Raises:
        UserError: other versions, or another time.
    """
    both = ours.versions.keys() & theirs.versions.keys()
    differ = sorted(name for name in both if _public(ours.versions[name]) != _public(theirs.versions[name]))
    if differ:
        got, expected = (", ".join(f"{name} {one.versions[name]}" for name in differ) for one in (theirs, ours))
        raise UserError(theirs.who, got=got, expected=f"{expected} as {ours.who} has", cure="install the same versions on both nodes")
    apart = theirs.time - ours.time
    if not math.isfinite(apart) or abs(apart) > clock_s:
        way = "ahead of" if apart > 0 else "behind"
        raise UserError(
            theirs.who,
            got=f"a clock {abs(apart):.1f} s {way} that of {ours.who}",
            expected=f"at most {clock_s:g} s (cluster.clock_s)",
            cure="set the clocks of both nodes by the same server (chronyc tracking, timedatectl)",
        )


def _public(version: str) -> str:
    """Without the build ("+cpu", "+cu126"): a controller needs no GPU."""
    return version.partition("+")[0]
