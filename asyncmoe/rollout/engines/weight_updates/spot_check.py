"""Finds weights of an engine that somebody else wrote: compares checksums of a random engine when a version lands and before it goes.

Between two versions nothing of ours writes an engine's weights, so its checksums must not change. The reference is what the trainer
expects (`sync.verify_every`), or without that, what the engine itself held directly after the version landed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence

from asyncmoe.errors import AsyncmoeError, WeightSyncError
from asyncmoe.rollout.engines.member import Member
from asyncmoe.rollout.engines.pool import Pool

log = logging.getLogger(__name__)
Checksums = Sequence[Mapping[str, str]]
_NAMED = 8
"""Maximum number of differing parameters that an error names; the rest are counted."""


class SpotCheck:
    """One engine of one version in `every`.

    Args:
        every: 0: never.
        seed: chooses the engines.
        timeout_s: limit on each request to an engine.

    Attributes:
        passed: engines that were checked and had not changed.
    """

    def __init__(self, pool: Pool, every: int, seed: int, timeout_s: float) -> None:
        self.passed = 0
        self._pool, self._every, self._timeout_s = pool, every, timeout_s
        self._draw = random.Random(f"spot checks of run {seed}")
        self._landed = 0
        self._member: Member | None = None
        self._version = 0
        self._reference: asyncio.Task[Checksums | None] | None = None
        self._checking: asyncio.Task[None] | None = None

    def landed(self, version: int, members: Sequence[Member], expected: Checksums = ()) -> None:
        """Choose an engine, if the version is due, and take its reference.

        Args:
            members: the engines that serve the version.
            expected: the trainer's checksums; empty if the version was not verified.
        """
        self._landed += 1
        if not self._every or not members or self._landed % self._every:
            return
        self._member, self._version = self._draw.choice(list(members)), version
        self._reference = asyncio.create_task(self._take(self._member, expected))

    def begin(self) -> None:
        """Begin the check of the chosen engine, if there is one, because its version will soon go. Idempotent."""
        if self._reference is not None and self._checking is None:
            self._checking = asyncio.create_task(self._check(self._reference))

    async def end(self) -> None:
        """Return when nothing is checked any more; the engines may change then."""
        self.begin()
        if self._checking is not None:
            await self._checking
        self._member = self._reference = self._checking = None

    async def _take(self, member: Member, expected: Checksums) -> Checksums | None:
        return expected or await self._ask(member)

    async def _check(self, reference: asyncio.Task[Checksums | None]) -> None:
        member, before = self._member, await reference
        assert member is not None
        if before is None or member.fenced is not None or (now := await self._ask(member)) is None:
            return
        try:
            compare(before, now)
        except WeightSyncError as error:
            why = f"somebody else wrote its weights while it served version {self._version}: {error}"
            log.error("anomaly: %s: %s", member.engine.name, why)
            self._pool.fence(member, why)
        else:
            self.passed += 1

    async def _ask(self, member: Member) -> Checksums | None:
        try:
            return await member.engine.client.checksums(self._timeout_s)
        except AsyncmoeError as error:
            log.warning("spot check of version %d: %s", self._version, error)
            return None


def compare(expected: Checksums, found: Checksums) -> None:
    """Raise if an engine's ranks do not hold the expected values; names without an expected checksum (buffers) are not compared.

    Raises:
        WeightSyncError: names the parameters.
    """
    if len(expected) != len(found):
        raise WeightSyncError(f"checksums: got {len(found)} ranks, expected {len(expected)}")
    wrong = [
        f"{name} of rank {rank}"
        for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True))
        for name, checksum in ours.items()
        if theirs.get(name) != checksum
    ]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise WeightSyncError(f"checksums differ: {', '.join(wrong[:_NAMED])}{more}")
