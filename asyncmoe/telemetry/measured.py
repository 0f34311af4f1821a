"""Statistics of values, some of which (None) were not measured."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

MOST_NAMES = 64
"""Maximum number of metric names in a record of many responses."""


def known(values: Iterable[float | None]) -> list[float]:
    """Return the measured values."""
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the measured values; None without any."""
    measured = known(values)
    return statistics.fmean(measured) if measured else None


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the measured values; None without any."""
    measured = known(values)
    return statistics.median(measured) if measured else None


def means(every: Iterable[Mapping[str, float]], most: int | None = None) -> dict[str, float]:
    """Return the mean under each name over the mappings that have it, by ascending name.

    Args:
        most: maximum number of names; those that most mappings have are kept. None: all.
    """
    values = defaultdict[str, list[float]](list)
    for one in every:
        for name, value in one.items():
            values[name].append(value)
    kept = sorted(values, key=lambda name: (-len(values[name]), name))[:most]
    return {name: statistics.fmean(values[name]) for name in sorted(kept)}


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of independent values, s / sqrt(n) with the sample standard deviation s of the n; None for
    fewer than two.

    It holds by the central limit theorem. The questions of an evaluation count as drawn independently from all possible ones (Miller 2024,
    "Adding Error Bars to Evals", arXiv:2411.00640). A question's value is the mean over its episodes, so s includes the variance of
    sampling its episodes; episodes of one question are not independent, and counting each separately would understate the error.
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def share(values: Iterable[float | None], whole: float) -> float | None:
    """Return the sum of the measured values / `whole`; None without any, or if `whole` is not above 0."""
    measured = known(values)
    return sum(measured) / whole if measured and whole > 0 else None
