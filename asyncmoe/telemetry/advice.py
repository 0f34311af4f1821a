"""Advice on a run: sentences that name a problem and the setting to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from asyncmoe.telemetry.format import number, percent
from asyncmoe.telemetry.measured import known, mean, median, share
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import Step

IDLE = 0.4
"""If the trainer or the engines are idle for more than this share of time, the other of the two is called the bottleneck."""
BOTH_IDLE = 0.25
"""If the trainer and the engines are both idle for more than this share, they are said to wait for each other."""
SETTLED_STEPS = 5
"""Minimum RL steps for advice on idle time; with fewer, shares of time reflect the start more than the run."""
DROPPED = 0.1
REJECTED = 0.05
SYNC_SHARE = SWITCH_SHARE = 0.2
PAUSE_SHARE = 0.1
OFF_POLICY = 0.2
"""Share of tokens, clipped by the objective or capped by truncated importance sampling, above which advice is given."""
LOGPROB_DIFF = 0.5
"""Log-probability difference in nats above which advice is given. float32 on one machine stays below 1e-4; bfloat16 with a different choice
of experts reaches a few tenths."""

ALL_WELL = "Nothing is off."
NO_STEP = "No reinforcement-learning step yet."
FEW_STEPS = f"Nothing is wrong so far; the bottleneck is named after {SETTLED_STEPS} RL steps."


class Advice(NamedTuple):
    """Advice on a page of runs.

    Attributes:
        text: a sentence.
        runs: the runs with the problem and what was found there, each as "first, second: Trainer idle 61 %"; [] on the page of one run.
        fine: `text` names no problem.
    """

    text: str
    runs: Sequence[str]
    fine: bool


def merged(advice: Mapping[str, Sequence[str]]) -> list[Advice]:
    """Merge the advice on several runs (by name), the most urgent first. Each remedy appears once, with the runs that need it."""
    if len(advice) == 1:
        return [Advice(text, [], text in (ALL_WELL, FEW_STEPS)) for sentences in advice.values() for text in sentences]
    found: dict[str, dict[str, list[str]]] = {}
    placed = [(place, name, text) for name, sentences in advice.items() for place, text in enumerate(sentences)]
    for _, name, text in sorted(placed, key=lambda one: one[0]):
        finding, _, remedy = text.partition(": ")
        found.setdefault(remedy or text, {}).setdefault(finding if remedy else "", []).append(name)
    return [
        Advice(
            text[0].upper() + text[1:],
            [": ".join(filter(None, (", ".join(names), finding))) for finding, names in runs.items()],
            text in (ALL_WELL, FEW_STEPS),
        )
        for text, runs in found.items()
    ]


def advise(rl: Sequence[Step], rollout: Sequence[Rollout] = ()) -> list[str]:
    """Return one sentence per problem, the most urgent first: wrong results before lost time.

    Args:
        rl: RL steps, oldest first.
        rollout: rollout records, oldest first; counters are taken from the newest.
    """
    if not rl:
        return [NO_STEP]
    settled = len(rl) >= SETTLED_STEPS
    found = [*_wrong(rl, rollout[-1] if rollout else Rollout(time=0.0)), *(_slow(rl, rollout) if settled else ())]
    return found or [ALL_WELL if settled else FEW_STEPS]


def _wrong(rl: Sequence[Step], last: Rollout) -> Iterator[str]:
    if (difference := max(known(step.logprob_diff_max_same_version for step in rl), default=0.0)) > LOGPROB_DIFF:
        yield (
            f"Engines and trainer differ by up to {number(difference)} nats on tokens of the same version: check the engines' weights "
            "with sync.verify_every=1, and that both sides use the same dtype."
        )
    if max(known(step.reward_std for step in rl), default=1.0) <= 1e-9:
        reward = number(mean(step.reward_mean for step in rl))
        yield (
            f"Every response gets the same reward ({reward}), so there is nothing to learn from: choose easier or harder questions, "
            "raise rollout.temperature, or raise warmup.steps."
        )
    if (rejected := share(last.rejected.values(), last.started) or 0.0) > REJECTED:
        most = max(last.rejected, key=last.rejected.__getitem__)
        yield f"{percent(rejected)} of the trajectories were rejected, most of them because of {most}: check scoring.scorer."
    clipped, capped = mean(step.clip_fraction for step in rl), mean(step.tis_capped_fraction for step in rl)
    for tokens, name in ((clipped, "clipped"), (capped, "capped by objective.correction.cap")):
        if (tokens or 0.0) > OFF_POLICY:
            yield f"{percent(tokens)} of the tokens are {name}: lower queue.staleness.max_staleness or trainer.optimizer.lr."
    if (dropped := share([last.dropped.get("stale", 0), last.requeued.get("stale", 0)], last.accepted) or 0.0) > DROPPED:
        yield (
            f"{percent(dropped)} of the trajectories were dropped or requeued as too old: raise queue.staleness.max_staleness or lower "
            "rollout.max_concurrent."
        )


def _slow(rl: Sequence[Step], rollout: Sequence[Rollout]) -> Iterator[str]:
    if switches := [step.switch_seconds for step in rl[1:] if step.switch_seconds]:  # on shared devices one of the two always sleeps
        each = median(sum(one.values()) for one in switches) or 0.0
        if (switched := share([each * len(switches)], rl[-1].time - rl[0].time) or 0.0) > SWITCH_SHARE:
            yield f"Switches take {percent(switched)} of the time ({each:.2g} s a step): raise rollout.groups_per_step."
        return
    # The median over steps is robust to one slow start. For engines, only records after the first step count: that step waits for them.
    trainer = median(share([step.wait_seconds], step.step_seconds or 0.0) for step in rl) or 0.0
    busy = mean(at_work for record in rollout if record.time > rl[0].time for at_work in record.engine_utilization.values())
    engines = 0.0 if busy is None else 1 - busy
    if min(trainer, engines) > BOTH_IDLE:
        yield (
            f"Trainer idle {percent(trainer)} and engines idle {percent(engines)}: they wait for each other, or for scorers, "
            "tools and agents; raise queue.staleness.max_staleness so that the engines may run ahead, or make scorers, tools and agents "
            "faster."
        )
    elif trainer > IDLE:
        yield (
            f"Trainer idle {percent(trainer)} of a median step: the engines are the bottleneck; add engines (engines.count), raise "
            "engines.max_running (and rollout.max_concurrent if it is set), or lower rollout.max_new_tokens."
        )
    elif engines > IDLE:
        yield (
            f"Engines idle {percent(engines)}: the trainer is the bottleneck; add trainer ranks (trainer.ranks), raise "
            "trainer.tokens_per_microbatch, or give engines' devices to the trainer."
        )
    seconds = known(step.step_seconds for step in rl)
    updates = [step for step in rl if step.sync_seconds]
    if (synced := share((step.sync_wait_seconds for step in rl), sum(seconds)) or 0.0) > SYNC_SHARE:
        update_s = median(step.sync_seconds for step in updates)
        yield f"Weight sync takes {percent(synced)} of the time ({number(update_s, 's')} an update): raise sync.every."
    pause_ms, step_seconds = median(step.pause_ms for step in updates) or 0.0, median(seconds) or 0.0
    if pause_ms / 1000 > PAUSE_SHARE * step_seconds > 0:
        yield f"Engines pause {number(pause_ms, 'ms')} per update: raise sync.every, or leave GPUs room for a second copy of the weights."
