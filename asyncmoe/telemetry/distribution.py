"""Count numbers by value, rounded to a grid coarse enough to keep the mapping from value to count small."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

STEPS = 20
"""Maximum grid steps between the least and the greatest number."""
_LEAST = 1e-300
_DIGITS = 3
"""Significant digits of numbers that are all the same."""


def grid_step(least: float, greatest: float) -> float:
    """Return the grid spacing: the least of 1, 2 or 5 times a power of ten that needs at most `STEPS` steps; 0 if the numbers are equal."""
    wanted = greatest / STEPS - least / STEPS
    if wanted < _LEAST:
        return 0.0
    power = 10.0 ** math.floor(math.log10(wanted))
    # The last factor covers a quotient rounded to just above 5.
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= wanted * (1 - 1e-9))


def on_grid(value: float, step: float) -> float:
    """Return the grid point nearest to a number."""
    point = float(f"{round(value / step) * step:.12g}") + 0.0 if step else float(f"{value:.{_DIGITS}g}")
    return point if math.isfinite(point) else value


def counts(values: Iterable[float]) -> dict[float, int]:
    """Count finite numbers by their nearest grid point, in ascending order; at most `STEPS` + 2 points."""
    known = np.asarray([*values], np.float64).tolist()
    step = grid_step(min(known), max(known)) if known else 0.0
    return dict(sorted(Counter(on_grid(value, step) for value in known).items()))
