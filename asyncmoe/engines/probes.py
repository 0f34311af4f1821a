"""Compares engines with the trainer on probe tokens at the same version (`asyncmoe.trainer.probe` sends them)."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError, Disagreement, ProtocolError
from asyncmoe.rpc.messages import MAX_PROBED, Probe

log = logging.getLogger(__name__)
_POLL_S = 0.05
_AT_ONCE = 32
"""Texts at an engine at once."""


@dataclass(frozen=True)
class Compared:
    """One version, compared. Differences are |engine - trainer| log-probabilities in nats.

    Attributes:
        engine: the engine's name.
        tokens: number of tokens with a log-probability.
        divergence: mean of e^d - 1 - d with d = trainer - engine: Schulman's k3 (see `asyncmoe.trainer.logprob_mismatch`). Here tokens were
            not drawn from the engine at that version, so it is a distance and not an estimate of KL.
    """

    version: int
    engine: str
    tokens: int
    largest: float
    mean: float
    divergence: float


@dataclass(frozen=True)
class ProbeTotals:
    """Since the controller started: tokens and versions compared, versions missed, and the latest comparison."""

    tokens: int = 0
    versions: int = 0
    missed: int = 0
    last: Compared | None = None

    def then(self, found: Compared | None) -> ProbeTotals:
        """Return the totals after one more probe; None: it was missed."""
        if found is None:
            return ProbeTotals(self.tokens, self.versions, self.missed + 1, self.last)
        return ProbeTotals(self.tokens + found.tokens, self.versions + 1, self.missed, found)


def compare(version: int, engine: str, scored: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Compared:
    """Compare the trainer's and an engine's log-probabilities of texts; those of first tokens do not exist and do not count."""
    drift = np.concatenate([np.asarray(ours[1:], np.float64) - np.asarray(theirs[1:], np.float64) for ours, theirs in scored])
    apart = np.abs(drift)
    k3 = np.expm1(np.minimum(drift, 20.0)) - drift  # e^20 bounds it, as LOG_RATIO_LIMIT does in the trainer
    return Compared(version, engine, len(apart), float(apart.max()), float(apart.mean()), float(k3.mean()))


def check(probe: Probe) -> None:
    """Refuse a malformed probe.

    Raises:
        ProtocolError: sizes differ or are too large, or a value is not finite.
    """
    sizes = [len(tokens) for tokens in probe.tokens]
    if not sizes or min(sizes) < 2 or sum(sizes) > MAX_PROBED or sizes != [len(values) for values in probe.logprobs]:
        raise ProtocolError(f"probe of version {probe.version}: got {len(sizes)} texts of {sum(sizes)} tokens, expected equal sizes from 2")
    if not all(math.isfinite(value) for values in probe.logprobs for value in values):
        raise ProtocolError(f"probe of version {probe.version}: a log-probability is not finite")


class Prober:
    """Holds the newest probe until an engine serves its version, and asks a random one.

    Attributes:
        totals: what was compared so far.

    Args:
        seed: chooses the engines.
        timeout_s: limit on each request to an engine.
        most: divergence in nats a token above which the log warns; None: no limit.
    """

    def __init__(self, pool: Pool, seed: int, timeout_s: float, most: float | None) -> None:
        self.totals = ProbeTotals()
        self._pool, self._timeout_s, self._most = pool, timeout_s, most
        self._draw = random.Random(f"probes of run {seed}")
        self._pending: Probe | None = None
        self._came = asyncio.Event()

    def take(self, probe: Probe) -> None:
        """Take a probe; one that still waits is given up for it.

        Raises:
            ProtocolError: see `check`.
        """
        check(probe)
        if self._pending is not None:
            self.totals = self.totals.then(None)
        self._pending = probe
        self._came.set()

    async def require(self, probe: Probe) -> None:
        """Compare what all engines have loaded, adapters aside; an engine that does not answer is fenced.

        Raises:
            ProtocolError: see `check`.
            Disagreement: an engine diverges by more than `most`.
        """
        check(probe)
        for member in self._pool.present:
            found = await self._asked(probe, member, loaded=True)
            if found is None:
                self._pool.fence(member, "it did not answer the first probe")
            elif self._most is not None and not found.divergence <= self._most:
                got = f"got {found.divergence:.3g} nats a token over {found.tokens} tokens, expected at most {self._most:g}"
                raise Disagreement(f"verify.anomalies.kl_engine.above: {found.engine} with what it has loaded, and the trainer: {got}")
            else:
                member.compared = True
                self._say(found)

    async def run(self) -> None:
        """Compare probes; never returns."""
        while True:
            await self._came.wait()
            self._came.clear()
            while (probe := self._pending) is not None:
                member = self._serving(probe.version)
                if member is None and self._pool.version <= probe.version:
                    await asyncio.sleep(_POLL_S)
                    continue
                self._pending = None
                found = None if member is None else await self._asked(probe, member)
                self.totals = self.totals.then(found)
                if found is not None:
                    self._say(found)

    def _serving(self, version: int) -> Member | None:
        members = [member for member in self._pool.serving if member.version == version]
        return self._draw.choice(members) if members else None

    async def _asked(self, probe: Probe, member: Member, *, loaded: bool = False) -> Compared | None:
        """Return the comparison of the texts that the engine scored with the probe's version, or what it has `loaded` from the model's
        files; None if there are none, because it failed or served the next version first."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def ask(tokens: Sequence[int]) -> Sequence[float] | None:
            async with places:
                with member.serving() as serving:
                    answer = await member.engine.client.prompt_logprobs(tokens, self._timeout_s, None if loaded else serving.adapter)
                same = (serving.version == probe.version and (member.slots is not None or answer.version == str(probe.version))) or loaded
                return answer.logprobs if same else None

        found = await asyncio.gather(*(ask(tokens) for tokens in probe.tokens), return_exceptions=True)
        scored: list[tuple[Sequence[float], Sequence[float]]] = []
        for ours, theirs in zip(probe.logprobs, found, strict=True):
            if isinstance(theirs, AsyncmoeError):
                log.warning("probe of version %d: %s", probe.version, theirs)
                return None
            if isinstance(theirs, BaseException):
                raise theirs
            if theirs is not None:
                scored.append((ours, theirs))
        return compare(probe.version, member.engine.name, scored) if scored else None

    def _say(self, found: Compared) -> None:
        text = (
            f"{found.engine} and trainer at version {found.version}: |difference| max {found.largest:.2e}, mean {found.mean:.2e}, "
            f"divergence {found.divergence:.2e}, {found.tokens} probe tokens"
        )
        if self._most is not None and found.divergence > self._most:
            log.warning("anomaly: %s; the engine's weights are not the trainer's (verify.anomalies.kl_engine.above %g)", text, self._most)
        else:
            log.info("%s", text)
