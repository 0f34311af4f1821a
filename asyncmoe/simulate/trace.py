"""Records of a simulation, and their summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from asyncmoe.queue.admission import Ledger
from asyncmoe.simulate.plant import Mode, Plant


@dataclass
class Reading:
    """Totals at one moment; two readings delimit a window."""

    seconds: float = 0.0
    training: float = 0.0
    waiting: float = 0.0
    syncing: float = 0.0
    busy: float = 0.0
    sampled: float = 0.0
    trained_tokens: int = 0


@dataclass
class Trace:
    """Counts of a whole run.

    Attributes:
        ages: trained tokens by age, the number of versions they were behind the trainer.
        oldest_age: largest age of a trained group's oldest token.
        dropped: trajectories by reason.
    """

    now: Reading = field(default_factory=Reading)
    ages: Counter[int] = field(default_factory=Counter)
    oldest_age: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class SimulatedRun:
    """One simulated run. Seconds per step and idle shares are for the steady state, the steps after the first few.

    Attributes:
        wall: simulated seconds of all steps.
        step_s: seconds per step.
        train_s: seconds per step spent training.
        sync_s: seconds per step spent publishing, with engines generating or paused.
        wait_s: seconds per step in which the trainer had nothing to train on.
        tokens: tokens trained per step.
        trainer_idle: share of the time in which the trainer did not train.
        engine_idle: share of the engines' time in which they had no request or were paused.
        engine_rate: tokens sampled, as a share of the tokens that engines sample with every slot taken.
        ages: share of the trained tokens by age in versions.
        oldest_age: largest age of a trained token.
        lost: share of the started trajectories that were dropped.
        ledger: counts of trajectories by final state.
    """

    mode: str
    max_staleness: int
    steps: int
    wall: float
    step_s: float
    train_s: float
    sync_s: float
    wait_s: float
    tokens: float
    trainer_idle: float
    engine_idle: float
    engine_rate: float
    ages: dict[int, float]
    oldest_age: int
    lost: float
    dropped: dict[str, int]
    ledger: dict[str, int]

    @property
    def mean_age(self) -> float:
        """Mean age of a trained token."""
        return sum(age * share for age, share in self.ages.items())


def summarise(plant: Plant, mode: Mode, trace: Trace, since: Reading, warm: int, ledger: Ledger) -> SimulatedRun:
    """Summarise a run whose steady state began at the reading `since`, after `warm` steps."""
    now, steps = trace.now, plant.steps - warm
    window = now.seconds - since.seconds
    counts: dict[str, Any] = {name: getattr(ledger, name) for name in ("started", "running", "queued", "leased", "trained", "dropped")}
    tokens = sum(trace.ages.values())
    return SimulatedRun(
        mode=mode,
        max_staleness=plant.admission(mode).max_staleness,
        steps=plant.steps,
        wall=now.seconds,
        step_s=window / steps,
        train_s=(now.training - since.training) / steps,
        sync_s=(now.syncing - since.syncing) / steps,
        wait_s=(now.waiting - since.waiting) / steps,
        tokens=(now.trained_tokens - since.trained_tokens) / steps,
        trainer_idle=max(0.0, 1 - (now.training - since.training) / window),
        engine_idle=max(0.0, 1 - (now.busy - since.busy) / (window * plant.engines.count)),
        engine_rate=(now.sampled - since.sampled) / (window * plant.full_rate),
        ages={age: trace.ages[age] / tokens for age in sorted(trace.ages)},
        oldest_age=trace.oldest_age,
        lost=ledger.dropped / ledger.started,
        dropped=dict(trace.dropped),
        ledger=counts,
    )
