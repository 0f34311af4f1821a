"""The data of the report's curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncmoe.telemetry.overlap import Cover
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step

MOST_POINTS = 500


@dataclass(frozen=True)
class Series:
    """A curve: ascending x, and y of the same length."""

    x: Sequence[float]
    y: Sequence[float]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float | None]]) -> Series:
        """Build a series. Omits points without a value; averages neighbours if there are more than `MOST_POINTS` points."""
        known = [(x, y) for x, y in points if y is not None]
        size = -(-len(known) // MOST_POINTS) or 1
        chunks = [known[i : i + size] for i in range(0, len(known), size)]
        return cls([fmean(x for x, _ in chunk) for chunk in chunks], [fmean(y for _, y in chunk) for chunk in chunks])

    def smooth(self) -> Series:
        """Return the running mean over about a twentieth of the curve. The window shrinks symmetrically at the ends."""
        reach = max(len(self.y) // 40, 2)
        sides = [min(reach, i, len(self.y) - 1 - i) for i in range(len(self.y))]
        return Series(self.x, [fmean(self.y[i - side : i + side + 1]) for i, side in enumerate(sides)])


def rl_step(run: RunRecords, step: Step) -> int:
    """Return the step's number since the start of reinforcement learning; the first step is 1."""
    return step.step - run.rl[0].step + 1


def by_step(run: RunRecords, value: Callable[[Step], float | None]) -> Series:
    """Return a value of each RL step, over RL steps."""
    return Series.of([(rl_step(run, step), value(step)) for step in run.rl])


def evaluation(run: RunRecords) -> Series:
    """Mean reward of each evaluation, over the RL steps behind the evaluated version."""
    first = run.rl[0].step if run.rl else 1
    return Series.of([(record.version - first + 1, record.reward_mean) for record in run.evaluations])


def warmup_loss(run: RunRecords) -> Series:
    """Loss of the warm-up over its steps."""
    return Series.of([(step.step, step.loss) for step in run.steps if step.phase == "warmup"])


def trainer_idle(step: Step) -> float | None:
    """Percentage of the step in which the trainer waited for a batch."""
    return 100 * step.wait_seconds / step.step_seconds if step.step_seconds and step.wait_seconds is not None else None


def engine_idle(run: RunRecords) -> Series:
    """Percentage of each RL step in which an engine generated nothing, mean over engines."""
    covers = [Cover.of(run.intervals("generate", engine)) for engine in run.engines]

    def idle(step: Step) -> float | None:
        if not covers or step.time <= step.begin:
            return None
        return 100 * (1 - fmean(cover.within(step.begin, step.time) for cover in covers) / (step.time - step.begin))

    return by_step(run, idle)


def ages(run: RunRecords) -> dict[int, int]:
    """Number of sampled tokens of all RL steps by age in versions."""
    found: Counter[int] = Counter()
    for step in run.rl:
        found.update(step.ages or {})
    return {age: found[age] for age in sorted(found)}


def routing_mismatch(run: RunRecords) -> dict[int, float]:
    """Share of tokens, by layer, that the trainer's router would have sent to other experts; mean over RL steps."""
    found: dict[int, list[float]] = {}
    for step in run.rl:
        for layer, share in (step.routing_mismatch or {}).items():
            found.setdefault(layer, []).append(share)
    return {layer: fmean(found[layer]) for layer in sorted(found)}


def trained_per_s(step: Step) -> float | None:
    """Trained tokens per second of the step."""
    return step.tokens / step.step_seconds if step.step_seconds and step.tokens is not None else None


def over_minutes(run: RunRecords, value: str) -> Series:
    """A gauge of the rollout records over minutes of RL time since the first RL step began."""
    points: list[tuple[float, float | None]] = []
    before = 0.0
    for begin, end in run.rl_windows:
        inside = [record for record in run.rollout if begin <= record.time <= end]
        points += [((before + record.time - begin) / 60, getattr(record, value)) for record in inside]
        before += end - begin
    return Series.of(points)
