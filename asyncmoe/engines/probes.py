"""Compares what engines have loaded with the trainer's weights on probe tokens (`asyncmoe.trainer.loaded_weights` sends them)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.async_tasks import together
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError, Disagreement, ProtocolError
from asyncmoe.rpc.messages import MAX_PROBED, Probe

log = logging.getLogger(__name__)
_AT_ONCE = 32
"""Number of texts at an engine at once."""


@dataclass(frozen=True)
class Compared:
    """The comparison of one engine. Differences are |engine - trainer| log-probabilities in nats.

    Attributes:
        engine: the engine's name.
        tokens: number of tokens with a log-probability.
        divergence: mean of e^d - 1 - d with d = trainer - engine: Schulman's k3. Here tokens were not drawn from the engine, so it is a
            distance and not an estimate of KL.
    """

    engine: str
    tokens: int
    largest: float
    mean: float
    divergence: float


def compare(engine: str, scored: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Compared:
    """Compare the trainer's and an engine's log-probabilities of texts; first tokens have none and are skipped."""
    drift = np.concatenate([np.asarray(ours[1:], np.float64) - np.asarray(theirs[1:], np.float64) for ours, theirs in scored])
    apart = np.abs(drift)
    k3 = np.expm1(np.minimum(drift, 20.0)) - drift  # e^20 bounds it, as LOG_RATIO_LIMIT does in the trainer
    return Compared(engine, len(apart), float(apart.max()), float(apart.mean()), float(k3.mean()))


def check(probe: Probe) -> None:
    """Refuse a malformed probe.

    Raises:
        ProtocolError: sizes differ or are too large, or a value is not finite.
    """
    sizes = [len(tokens) for tokens in probe.tokens]
    if not sizes or min(sizes) < 2 or sum(sizes) > MAX_PROBED or sizes != [len(values) for values in probe.logprobs]:
        expected = f"texts of at least 2 tokens each and at most {MAX_PROBED} together, with a log-probability for each token"
        raise ProtocolError(f"probe: got {len(sizes)} texts of {sum(sizes)} tokens together, expected {expected}")
    if not all(math.isfinite(value) for values in probe.logprobs for value in values):
        raise ProtocolError("probe: a log-probability is not finite")


async def require(pool: Pool, probe: Probe, timeout_s: float, most: float | None) -> None:
    """Compare the weights that all engines have loaded, without adapters; fence an engine that does not answer.

    Args:
        timeout_s: limit on each request to an engine.
        most: largest divergence in nats a token; None: no limit.

    Raises:
        ProtocolError: see `check`.
        Disagreement: an engine diverges by more than `most`.
    """
    check(probe)
    for member in pool.present:
        found = await _asked(probe, member, timeout_s)
        if found is None:
            pool.fence(member, "it did not answer the first probe")
        elif most is not None and not found.divergence <= most:
            got = f"got {found.divergence:.3g} nats a token over {found.tokens} tokens, expected at most {most:g}"
            raise Disagreement(f"verify.anomalies.kl_engine.above: weights of {found.engine} against the trainer's: {got}")
        else:
            member.compared = True
            log.info(
                "%s and trainer on %d probe tokens: |difference| max %.2e, mean %.2e, divergence %.2e",
                *(found.engine, found.tokens, found.largest, found.mean, found.divergence),
            )


async def _asked(probe: Probe, member: Member, timeout_s: float) -> Compared | None:
    """Score the texts with the engine's loaded weights and return the comparison, or None if the engine failed."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask(tokens: Sequence[int]) -> Sequence[float]:
        async with places:
            return await member.engine.client.prompt_logprobs(tokens, timeout_s)

    try:
        found = await together([ask(tokens) for tokens in probe.tokens])
    except AsyncmoeError as error:
        log.warning("probe: %s", error)
        return None
    return compare(member.engine.name, list(zip(probe.logprobs, found, strict=True)))
