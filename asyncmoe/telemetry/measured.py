"""Statistics of values, some of which (None) were not measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable


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


def share(values: Iterable[float | None], whole: float) -> float | None:
    """Return the sum of the measured values / `whole`; None without any, or if `whole` is not above 0."""
    measured = known(values)
    return sum(measured) / whole if measured and whole > 0 else None
