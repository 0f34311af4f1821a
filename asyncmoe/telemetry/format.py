"""Format numbers for people. A missing value becomes an en dash."""

from __future__ import annotations

from collections.abc import Mapping

ABSENT = "–"
_NAMED = 4


def number(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Format with three significant digits; from 10,000 on, with thousands separators and no decimals."""
    if value is None:
        return ABSENT
    if abs(value) >= 10_000:
        text = f"{value:,.0f}"
    elif abs(value) >= 10 ** (digits - 1) or value == int(value):
        text = f"{value:.0f}"
    else:
        text = f"{value:.{digits}g}"
    return f"{text} {unit}" if unit else text


def named(values: Mapping[str, float | None] | None) -> list[str]:
    """Format the first few numbers by name: ["format 0.5", "words 12"]."""
    return [f"{name} {number(value)}" for name, value in list((values or {}).items())[:_NAMED]]


def percent(share: float | None) -> str:
    """Format 0.613 as "61 %"; with one decimal within one per cent of 0 % or 100 %."""
    if share is None:
        return ABSENT
    near = 0 < abs(share) < 0.01 or 0.99 < share < 1
    return f"{100 * share:.{1 if near else 0}f} %"


def duration(seconds: float | None) -> str:
    """Format with the two largest units: "2 h 05 min", "3 min 12 s", "41 s"."""
    if seconds is None:
        return ABSENT
    if seconds < 10:
        return number(seconds, "s", 2)
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02d} min"


def quantity(value: float | None, unit: str) -> str:
    """Format a metric in its unit (`metric.Metric.unit`); units that need no name in a row of numbers are left out."""
    if unit == "seconds":
        return duration(value)
    if unit.startswith("share"):
        return percent(value)
    return number(value, "ms" if unit == "milliseconds" else "")
