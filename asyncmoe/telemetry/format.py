"""Numbers as a person reads them. What was not measured is an en dash."""

from __future__ import annotations

from collections.abc import Mapping

ABSENT = "–"
_BLOCKS = " ▏▎▍▌▋▊▉█"


def number(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Three significant digits; from 10,000 on with separators and without decimals."""
    if value is None:
        return ABSENT
    if abs(value) >= 10_000:
        text = f"{value:,.0f}"
    elif abs(value) >= 10 ** (digits - 1) or value == int(value):
        text = f"{value:.0f}"
    else:
        text = f"{value:.{digits}g}"
    return f"{text} {unit}" if unit else text


def percent(share: float | None) -> str:
    """0.613 as "61 %"; tenths of a per cent within one per cent of nothing and of all."""
    if share is None:
        return ABSENT
    near = 0 < abs(share) < 0.01 or 0.99 < share < 1
    return f"{100 * share:.{1 if near else 0}f} %"


def duration(seconds: float | None) -> str:
    """The two largest units: "2 h 05 min", "3 min 12 s", "41 s"."""
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


def bars(counts: Mapping[int, int] | None, width: int = 10, most: int = 5) -> str:
    """A histogram in one line: each key, a bar of its share (`width` cells are the whole), the share; keys from `most - 1` on are one."""
    total = sum(counts.values()) if counts else 0
    if not counts or total <= 0:
        return ABSENT
    low = {key: counts[key] for key in sorted(counts) if key < most - 1}
    high = sum(count for key, count in counts.items() if key >= most - 1)
    rows = [(str(key), count) for key, count in low.items()] + ([(f"{most - 1}+", high)] if high else [])
    return "   ".join(f"{key} {bar(count / total, width)} {percent(count / total)}" for key, count in rows)


def bar(share: float, width: int = 10) -> str:
    """A bar of block characters; `width` cells are the whole. What is more than nothing is seen."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    full, part = divmod(eighths, 8)
    return _BLOCKS[8] * full + (_BLOCKS[part] if part else "")
