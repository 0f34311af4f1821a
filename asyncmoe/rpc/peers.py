"""Compatibility check for processes on other machines: equal versions of common packages, equal NCCL settings, and synchronized clocks."""

from __future__ import annotations

import importlib.metadata
import math
import socket
import time
from collections.abc import Iterable

import msgspec

from asyncmoe.errors import ConfigError, UserError
from asyncmoe.rpc import nccl_settings

ALIKE = ("asyncmoe", "torch", "megatron-core", "transformer-engine", "sglang", "transformers", "msgspec")
"""Packages whose versions a process reports, if installed."""
MOST_APART_S = 10.0
"""Largest accepted difference between the clocks of two machines."""
STARTER = "ASYNCMOE_STARTER"
"""Environment variable of an engine's server: the `Facts` of the process that starts it, as JSON."""


class Facts(msgspec.Struct, frozen=True):
    """Facts that a process reports when it joins."""

    host: str
    role: str
    """Its name in the run: "trainer.3"."""
    versions: dict[str, str]
    """Version of each installed package of `ALIKE`."""
    time: float
    """The process's clock, in Unix seconds, when it collected the facts."""
    nccl: dict[str, str] = {}
    """See `nccl_settings.shared`."""

    @property
    def who(self) -> str:
        """The process's name in messages."""
        return f"{self.role} on {self.host}"


def facts(role: str, packages: Iterable[str] = ALIKE) -> Facts:
    """Collect the facts of this process now."""
    found = {name: one.version for name in packages for one in [*importlib.metadata.distributions(name=name)][:1]}
    return Facts(socket.gethostname(), role, found, time.time(), nccl_settings.shared())


def check_digest(whose: str, theirs: str, ours: str) -> None:
    """Refuse a process whose configuration digest differs from the controller's. Raises ConfigError."""
    if theirs != ours:
        raise ConfigError(
            f"configuration of {whose}",
            got=f"digest {theirs[:12]}",
            expected=f"the controller's, {ours[:12]}",
            hint="start both with the same file, as run.dir/config.yaml has it, and the same key=value overrides",
        )


def check(ours: Facts, theirs: Facts | None, most_apart_s: float = MOST_APART_S) -> None:
    """Refuse an incompatible process. The error is one line that names the process, its node and a fix.

    Compares only packages that both processes have: the environments of engines and trainers differ. The measured clock difference
    includes the transfer time of `theirs`.

    Args:
        ours: facts of this process, collected when `theirs` arrive.
        theirs: facts of the other process; None if it sent none.

    Raises:
        UserError: versions or settings of NCCL differ, or clocks differ by more than `most_apart_s`.
    """
    if theirs is None:
        return
    both, all_set = ours.versions.keys() & theirs.versions.keys(), ours.nccl.keys() | theirs.nccl.keys()
    for names, of_ours, of_theirs, hint in (
        (both, ours.versions, theirs.versions, "install the same versions on both nodes"),
        (
            all_set,
            ours.nccl,
            theirs.nccl,
            "NCCL carries weights between both: export the same variables before both start; NCCL's files count too",
        ),
    ):
        if differ := sorted(name for name in names if _public(of_ours.get(name, "unset")) != _public(of_theirs.get(name, "unset"))):
            got, expected = (", ".join(f"{name} {one.get(name, 'unset')}" for name in differ) for one in (of_theirs, of_ours))
            raise UserError(theirs.who, got=got, expected=f"{expected} as {ours.who} has", hint=hint)
    apart = theirs.time - ours.time
    if not math.isfinite(apart) or abs(apart) > most_apart_s:
        way = "ahead of" if apart > 0 else "behind"
        raise UserError(
            theirs.who,
            got=f"a clock {abs(apart):.1f} s {way} that of {ours.who}",
            expected=f"at most {most_apart_s:g} s",
            hint="synchronise both nodes with the same time server (chronyc tracking, timedatectl)",
        )


def _public(version: str) -> str:
    """Strip the build tag ("+cpu", "+cu126"): a controller needs no GPU build."""
    return version.partition("+")[0]
