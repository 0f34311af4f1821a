"""What is the same on both sides: model, prompts, batch, lengths, learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"
LEVEL = 0.9
SETTLE = 4
"""First steps, which are not measured."""


@dataclass(frozen=True)
class SmallCase:
    """Answers of one length.

    Attributes:
        longest: tokens of an answer, at most.
        steps: RL steps of each arm.
        raw: samples asked of the raw server.
    """

    name: str
    longest: int
    steps: int
    raw: int

    def settings(self, model: Path, ranks: int) -> list[str]:
        """Overrides of the demo's configuration."""
        return [
            f"model.path={model}",
            "warmup.steps=0",
            f"run.steps={self.steps + SETTLE + 1}",
            f"rollout.max_new_tokens={self.longest}",
            "scoring.scorer=benchmarks.small_scale.task:Digits",
            f"scoring.options={{places: {self.longest}}}",
            f"trainer.ranks={ranks}",
            f"trainer.ep={ranks}",
            "telemetry.tensorboard=false",
        ]


@dataclass(frozen=True)
class Told:
    """One step, as an arm tells of it when it has ended.

    Attributes:
        seconds: since the first request for an answer.
        cpu: CPU seconds so far, by role.
        reward: mean of the step's samples.
        tokens: mean length of their answers.
    """

    seconds: float
    cpu: Mapping[str, float]
    reward: float
    tokens: float


def figures(steps: Sequence[Told], batch: int) -> dict[str, Any]:
    """Return what is reported of an arm; see `run.run`.

    Args:
        steps: all its steps, in order; after the first `SETTLE` CPU time and seconds count.
    """
    first, last = steps[SETTLE - 1], steps[-1]
    samples = batch * (len(steps) - SETTLE)
    cpu = {role: round(1e3 * (last.cpu[role] - first.cpu[role]) / samples, 3) for role in last.cpu}
    reached = next((number for number, one in enumerate(steps) if one.reward >= LEVEL), None)
    return {
        "cpu_ms": cpu,
        "samples_per_s": round(samples / (last.seconds - first.seconds), 1),
        "tokens": round(fmean(one.tokens for one in steps[SETTLE:]), 2),
        "reached_step": None if reached is None else reached + 1,
        "reached_s": None if reached is None else round(steps[reached].seconds, 1),
        "reward": [round(one.reward, 3) for one in steps],
    }
