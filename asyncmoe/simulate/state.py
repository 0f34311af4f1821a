"""State shared by a simulation and its engines: time and events, admission policy, counts, groups of responses; and the outcome."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from asyncmoe.queue.admission import Ledger
from asyncmoe.simulate.plant import Mode, Plant
from asyncmoe.simulate.workload import Episode


class SimulatedGroup:
    """A group between start and training.

    Attributes:
        left: members not scored yet.
        oldest: version of the group's first sampled token.
        tokens: tokens of complete turns, by version.
    """

    __slots__ = ("episodes", "left", "members", "oldest", "tokens")

    def __init__(self, episodes: list[Episode]) -> None:
        self.episodes = episodes
        self.members = [SimulatedResponse(self, episode) for episode in episodes]
        self.left = len(episodes)
        self.oldest: float = math.inf
        self.tokens: dict[int, float] = {}

    def end(self) -> None:
        """Drop the members, once the group is trained or dropped. This ends a cycle of references, so that group and members are freed at
        once."""
        self.members = []


class SimulatedResponse:
    """One response of a group.

    Attributes:
        version: version served when its current turn was sent.
    """

    __slots__ = ("group", "tools", "turn", "turns", "version")

    def __init__(self, group: SimulatedGroup, episode: Episode) -> None:
        self.group, self.turn, self.version = group, 0, 0
        self.turns, self.tools = episode


class EventClock:
    """Simulated seconds and future events. Engine time stops while the engines pause.

    Attributes:
        now: simulated seconds since the start.
        paused: True while the engines pause.
    """

    def __init__(self) -> None:
        self.now, self.paused = 0.0, False
        self._paused_at = self._paused_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    @property
    def engine_time(self) -> float:
        """Seconds in which the engines were not paused."""
        return (self._paused_at if self.paused else self.now) - self._paused_s

    def at_engine_time(self, seconds: float) -> float:
        """Return when engine time will be `seconds`; inf while the engines pause."""
        return math.inf if self.paused else seconds + self._paused_s

    def pause(self) -> None:
        """Stop engine time."""
        self.paused, self._paused_at = True, self.now

    def resume(self) -> None:
        """Resume engine time."""
        self.paused = False
        self._paused_s += self.now - self._paused_at

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Call `what` after `seconds`; events at the same time happen in scheduling order."""
        self._scheduled += 1
        heappush(self._events, (self.now + seconds, self._scheduled, what))

    def next_event(self) -> float:
        """Return the time of the next event; inf if there is none."""
        return self._events[0][0] if self._events else math.inf

    def run_next(self) -> None:
        """Advance to the next event and let it happen."""
        self.now, _, what = heappop(self._events)
        what()


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


class RunState:
    """The facts of a run that several actors read and change.

    Attributes:
        law: the live system's admission policy, with the bound of the mode.
        version: version that the engines serve.
        steps: steps trained so far.
        now: totals so far.
        ages: trained tokens by age, the number of versions they were behind the trainer.
        oldest_age: largest age of a trained group's oldest token.
    """

    def __init__(self, plant: Plant, mode: Mode) -> None:
        self.plant, self.mode, self.law = plant, mode, plant.admission(mode)
        self.clock, self.rng = EventClock(), random.Random(plant.seed)
        self.ledger, self.now = Ledger(), Reading()
        self.ages, self.oldest_age = Counter[int](), 0
        self.version, self.steps = 0, 0


@dataclass(frozen=True)
class SimulatedRun:
    """One simulated run. Seconds per step and idle shares are for the steady state, after the first few steps.

    Attributes:
        wall: simulated seconds of all steps.
        step_s: seconds per step.
        train_s: seconds per step spent training.
        sync_s: seconds per step spent publishing, with engines generating or paused.
        wait_s: seconds per step in which the trainer waited for a batch.
        tokens: tokens trained per step.
        trainer_idle: share of the time in which the trainer did not train.
        engine_idle: share of the engines' time in which they had no request or were paused.
        engine_rate: tokens sampled, as a share of the tokens that engines sample with every slot occupied.
        ages: share of the trained tokens by age in versions.
        oldest_age: largest age of a trained token.
        lost: share of the started trajectories that were dropped.
        ledger: numbers of trajectories, started and by outcome.
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
