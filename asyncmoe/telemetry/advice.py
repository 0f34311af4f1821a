"""Advice from gauges: sentences that name a problem and the setting to change."""

from __future__ import annotations

from collections.abc import Iterator

from asyncmoe.telemetry.format import number, percent
from asyncmoe.telemetry.gauges import Gauges

IDLE = 0.4
"""Share of idle time above which the other side is called the bottleneck."""
BOTH_IDLE = 0.25
"""Share of idle time of both sides above which they are reported to wait for each other."""
SETTLED_STEPS = 5
"""RL steps without which shares of time say more about the start than about the run."""
DROPPED = 0.1
REJECTED = 0.05
SYNC_SHARE = 0.2
PAUSE_SHARE = 0.1
OFF_POLICY = 0.2
"""Share of tokens clipped by the objective, or capped by truncated importance sampling."""
LOGPROB_DIFF = 0.5
"""In nats. float32 on one machine stays below 1e-4; bfloat16 with a different expert choice reaches a few tenths."""

ALL_WELL = "No gauge is off."
NO_STEP = "No reinforcement-learning step yet."
FEW_STEPS = f"Nothing is wrong so far; what limits the speed is said after {SETTLED_STEPS} RL steps."


def advise(gauges: Gauges) -> list[str]:
    """Return one sentence per abnormal gauge, the most urgent first: wrong results before lost time."""
    if gauges.steps == 0:
        return [NO_STEP]
    settled = gauges.steps >= SETTLED_STEPS
    found = [*_wrong(gauges), *(_slow(gauges) if settled else ())]
    return found or [ALL_WELL if settled else FEW_STEPS]


def _wrong(g: Gauges) -> Iterator[str]:
    if (g.logprob_diff or 0.0) > LOGPROB_DIFF:
        yield (
            f"Engines and trainer differ by up to {number(g.logprob_diff)} nats on tokens of the same version: check the engines' weights "
            "with sync.verify_every=1, and that both sides use the same dtype."
        )
    if g.reward_std is not None and g.reward_std <= 1e-9:
        yield (
            f"Every response gets the same reward ({number(g.reward)}), so there is nothing to learn from: change task.difficulty, "
            "raise rollout.temperature, or take more warmup.steps."
        )
    if (g.rejected or 0.0) > REJECTED:
        yield f"{percent(g.rejected)} of the trajectories were rejected, most of them because of {g.rejected_most}: check scoring.scorer."
    for share, name in ((g.clip_fraction, "clipped"), (g.tis_capped, "capped by objective.correction.cap")):
        if (share or 0.0) > OFF_POLICY:
            yield f"{percent(share)} of the tokens are {name}: lower queue.staleness.max_staleness or trainer.optimizer.lr."
    if (g.dropped or 0.0) > DROPPED:
        yield (
            f"{percent(g.dropped)} of the trajectories were dropped or requeued as too old: raise queue.staleness.max_staleness or lower "
            "rollout.max_concurrent."
        )


def _slow(g: Gauges) -> Iterator[str]:
    trainer, engines = g.trainer_idle or 0.0, g.engine_idle or 0.0
    if min(trainer, engines) > BOTH_IDLE:
        yield (
            f"Trainer idle {percent(g.trainer_idle)} and engines idle {percent(g.engine_idle)}: they wait for each other, or for scorers, "
            "tools and agents; raise queue.staleness.max_staleness so that the engines may run ahead, or make the latter faster."
        )
    elif trainer > IDLE:
        yield (
            f"Trainer idle {percent(g.trainer_idle)}: the engines are the bottleneck; add engines (engines.count), raise "
            "engines.max_running and rollout.max_concurrent, or lower rollout.max_new_tokens."
        )
    elif engines > IDLE:
        yield (
            f"Engines idle {percent(g.engine_idle)}: the trainer is the bottleneck; add trainer ranks (trainer.ranks), raise "
            "trainer.tokens_per_microbatch, or give engines' devices to the trainer."
        )
    if (g.sync_share or 0.0) > SYNC_SHARE:
        yield f"Weight sync takes {percent(g.sync_share)} of the time ({number(g.sync_seconds, 's')} an update): raise sync.every."
    if g.pause_ms is not None and g.step_seconds and g.pause_ms / 1000 > PAUSE_SHARE * g.step_seconds:
        yield f"Engines pause {number(g.pause_ms, 'ms')} per update: raise sync.every, or leave GPUs room for a second copy of the weights."
