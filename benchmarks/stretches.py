"""Two ways of running, in turn within one run: stretches with something and stretches without, and what the difference costs.

The CPU time of a step differs more from run to run than what is measured costs; the two stretches of a pair lie side by side in one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

SETTLE = 2
"""First steps of a run, which belong to no stretch."""
STEPS = 6
"""Steps of a stretch."""
_EDGE = 2
"""Steps at the beginning of a stretch that are not measured: groups begin up to two steps before they are trained."""
LEAST_PAIRS = 10


@dataclass(frozen=True)
class Pairs:
    """CPU seconds a token in the stretches of each pair, and the mean number of tokens of a step."""

    plain: Sequence[float]
    kept: Sequence[float]
    tokens: float

    @classmethod
    def of(cls, each: Sequence[tuple[float, int]], pairs: int) -> Pairs:
        """Cut a run into pairs of stretches. `each`: CPU seconds and sampled tokens of each of its `steps(pairs)` steps."""
        spent = [_per_token(each[SETTLE + i * STEPS :][_EDGE:STEPS]) for i in range(2 * pairs)]
        kept = [spent[i] if keeps(i) else spent[i + 1] for i in range(0, 2 * pairs, 2)]
        plain = [spent[i + 1] if keeps(i) else spent[i] for i in range(0, 2 * pairs, 2)]
        return cls(plain, kept, fmean(tokens for _, tokens in each[SETTLE:]))

    @classmethod
    def joined(cls, several: Sequence[Mapping[str, Any]]) -> Pairs:
        """The pairs of several runs, from the `figures` of each."""
        plain, kept = ([us / 1e6 for one in several for us in one[key]] for key in ("plain_us", "kept_us"))
        return cls(plain, kept, fmean(one["tokens"] for one in several))

    @property
    def plain_ms(self) -> float:
        """CPU time of a step without."""
        return 1e3 * fmean(self.plain) * self.tokens

    def figures(self) -> dict[str, Any]:
        """Return what is reported of the pairs.

        "tokens" of a step; "cpu_us_per_token" without (mean over stretches); "share" (mean over pairs of with / without - 1), "low" and
        "high" (its 95 % interval); "added_ms", "added_low_ms", "added_high_ms" (CPU time added to a step, mean over pairs and its 95 %
        interval); "plain_us", "kept_us" (CPU time of a token in the stretches of each pair).
        """
        share, half = interval([one / other - 1 for one, other in zip(self.kept, self.plain, strict=True)])
        more, either_way = interval([1e3 * (one - other) * self.tokens for one, other in zip(self.kept, self.plain, strict=True)])
        return {
            "tokens": round(self.tokens),
            "cpu_us_per_token": round(1e6 * fmean(self.plain), 2),
            "share": round(share, 5),
            "low": round(share - half, 5),
            "high": round(share + half, 5),
            "added_ms": round(more, 3),
            "added_low_ms": round(more - either_way, 3),
            "added_high_ms": round(more + either_way, 3),
            "plain_us": [round(1e6 * one, 2) for one in self.plain],
            "kept_us": [round(1e6 * one, 2) for one in self.kept],
        }


def steps(pairs: int) -> int:
    """Return the steps of a run with so many pairs of stretches."""
    return SETTLE + 2 * pairs * STEPS


def on(group: int, groups_per_step: int) -> bool:
    """Whether a group begins in a stretch with."""
    return keeps((group // groups_per_step - SETTLE) // STEPS)


def keeps(stretch: int) -> bool:
    """Whether a stretch is one with. With, without, without, with, and again, so that a steady drift of the machine cancels out."""
    return stretch % 4 in (0, 3)


def in_whole_run(case: dict[str, Any], all_ms: float) -> dict[str, float]:
    """Return the share of a case's added time in the CPU time of a step of a whole run, and its 95 % interval."""
    names = {"measured": "added_ms", "measured_low": "added_low_ms", "measured_high": "added_high_ms"}
    return {name: round(case[source] / all_ms, 5) for name, source in names.items()}


def line(case: dict[str, Any]) -> str:
    """A case for a reader, under `HEAD`."""
    bounds = f"{case['low']:.2%} to {case['high']:.2%}"
    return f"{case['name']:<8}{case['cpu_us_per_token']:12.1f}{case['share']:10.2%}{bounds:>20}"


HEAD = f"{'':<8}{'us a token':>12}{'more':>10}{'95 % interval':>20}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    return fmean(values), t95(len(values) - 1) * stdev(values) / len(values) ** 0.5


def t95(freedom: int) -> float:
    """Return Student's t for a 95 % interval (Abramowitz and Stegun, 26.7.5), within 0.2 % from 9 degrees of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _per_token(taken: Sequence[tuple[float, int]]) -> float:
    return sum(seconds for seconds, _ in taken) / sum(tokens for _, tokens in taken)
