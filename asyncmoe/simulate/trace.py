"""The outcome of a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from asyncmoe.simulate.state import Reading, RunState


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
        ledger: number of trajectories by what became of them, and of those that were started.
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
    ledger: dict[str, int]

    @property
    def mean_age(self) -> float:
        """Mean age of a trained token."""
        return sum(age * share for age, share in self.ages.items())


def summarise(state: RunState, since: Reading, warm: int) -> SimulatedRun:
    """Summarise a run whose steady state began at the reading `since`, after `warm` steps."""
    plant, now, ledger = state.plant, state.now, state.ledger
    steps, window, tokens = plant.steps - warm, now.seconds - since.seconds, sum(state.ages.values())
    return SimulatedRun(
        mode=state.mode,
        max_staleness=state.law.max_staleness,
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
        ages={age: state.ages[age] / tokens for age in sorted(state.ages)},
        oldest_age=state.oldest_age,
        lost=ledger.dropped / ledger.started,
        ledger={name: getattr(ledger, name) for name in ("started", "running", "queued", "leased", "trained", "dropped")},
    )
