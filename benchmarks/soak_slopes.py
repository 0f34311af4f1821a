"""Whether what a run holds grows: slopes of its samples, and the verdict on them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import sqrt
from statistics import fmean
from typing import Any

SETTLE_S = 600.0
"""First seconds of the run, which are not measured: pools fill, and allocators find their size."""
BLOCKS = 20
"""Equal stretches of time whose means are compared: samples that follow one another are not independent, their means over minutes nearly
are."""
LEAST = 3 * BLOCKS
"""Samples that slopes need."""
BOUND_MB = 1.0
"""Most MB that a process may grow in 1,000 steps: the upper end of the 95 % interval of its slope."""
MEMORY = ("anonymous", "pss", "rss")
COUNTS = ("threads", "descriptors")


def figures(samples: Sequence[dict[str, Any]], settle_s: float = SETTLE_S) -> dict[str, Any]:
    """Return slopes and verdicts of a run.

    Args:
        samples: {"s": seconds since the start, "steps": steps done, "processes": {name: `held.Held` as a mapping}, "folders": {name:
            {"files", "bytes"}}}.
        settle_s: seconds of the start that are left out.

    Returns:
        {"from_s", "to_s", "steps", "flat", "processes", "folders"}, the last two by name, with - for what is no letter or digit. Of a
        process: of "anonymous", "pss" and "rss" (MB) "first", "last" (of 20 blocks), "per_1000_steps", "per_hour" and their 95 % intervals
        "low", "high", "low_per_hour", "high_per_hour", and "later", the slope over 1,000 steps of the second half; of "threads" and
        "descriptors" "first" and "last" (least of a block) and "most"; "flat". Of a folder: of "files" and "bytes" "first", "last",
        "most", "per_1000_steps". flat: no process's anonymous memory may have grown by more than `BOUND_MB` in 1,000 steps, and none has
        more threads or descriptors at the end. Processes that were not there from `settle_s` to the end are in "passing", with the number
        of samples that saw them.
    """
    used = [one for one in samples if one["s"] >= settle_s]
    if len(used) < LEAST:
        raise ValueError(f"samples after {settle_s:g} s: got {len(used)}, expected at least {LEAST}")
    blocks = [used[i * len(used) // BLOCKS : (i + 1) * len(used) // BLOCKS] for i in range(BLOCKS)]
    seen: dict[str, int] = {}
    for one in used:
        for name in one["processes"]:
            seen[name] = seen.get(name, 0) + 1
    staying = [name for name, times in seen.items() if times == len(used)]
    processes = {re.sub(r"[^\w-]", "-", name): _process(name, blocks) for name in staying}
    return {
        "from_s": round(used[0]["s"]),
        "to_s": round(used[-1]["s"]),
        "steps": used[-1]["steps"] - used[0]["steps"],
        "flat": all(one["flat"] for one in processes.values()),
        "processes": processes,
        "passing": {name: times for name, times in seen.items() if name not in staying},
        "folders": {re.sub(r"[^\w-]", "-", name): _folder(name, blocks) for name in used[0]["folders"]},
    }


def _process(name: str, blocks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    steps, hours = _steps(blocks), _hours(blocks)
    found: dict[str, Any] = {}
    for key in MEMORY:
        mb = [fmean(one["processes"][name][key] for one in block) / 1e6 for block in blocks]
        slope, half = line(steps, mb)
        hourly, half_hourly = line(hours, mb)
        later, _ = line(steps[BLOCKS // 2 :], mb[BLOCKS // 2 :])
        found[key] = {
            "first": round(mb[0], 2),
            "last": round(mb[-1], 2),
            "per_1000_steps": round(slope, 3),
            "low": round(slope - half, 3),
            "high": round(slope + half, 3),
            "later": round(later, 3),
            "per_hour": round(hourly, 3),
            "low_per_hour": round(hourly - half_hourly, 3),
            "high_per_hour": round(hourly + half_hourly, 3),
        }
    for key in COUNTS:
        each = [[one["processes"][name][key] for one in block] for block in blocks]
        found[key] = {"first": min(each[0]), "last": min(each[-1]), "most": max(map(max, each))}
    counts_flat = all(found[key]["last"] <= found[key]["first"] for key in COUNTS)
    return {**found, "flat": counts_flat and found["anonymous"]["high"] <= BOUND_MB}


def _folder(name: str, blocks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    found = {}
    for key in ("files", "bytes"):
        each = [[one["folders"][name][key] for one in block] for block in blocks]
        slope, _ = line(_steps(blocks), [fmean(values) for values in each])
        found[key] = {"first": min(each[0]), "last": min(each[-1]), "most": max(map(max, each)), "per_1000_steps": round(slope, 3)}
    return found


def _steps(blocks: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [fmean(one["steps"] for one in block) / 1000 for block in blocks]


def _hours(blocks: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [fmean(one["s"] for one in block) / 3600 for block in blocks]


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the slope of y over x by least squares, and half the width of its 95 % interval; x must not be constant."""
    middle, level = fmean(x), fmean(y)
    spread = sum((one - middle) ** 2 for one in x)
    slope = sum((one - middle) * (other - level) for one, other in zip(x, y, strict=True)) / spread
    left = sum((other - level - slope * (one - middle)) ** 2 for one, other in zip(x, y, strict=True))
    freedom = len(x) - 2
    return slope, t95(freedom) * sqrt(left / freedom / spread)


def table(found: dict[str, Any]) -> str:
    """A line a process, for a reader."""
    head = f"{'':<24}{'MB':>8}{'to':>8}{'MB/1,000 steps':>16}{'95 % interval':>18}{'later':>8}{'threads':>12}{'descriptors':>12}"
    lines = [f"{found['steps']} steps, {found['from_s']} to {found['to_s']} s: {'flat' if found['flat'] else 'NOT FLAT'}", head]
    for name, one in found["processes"].items():
        memory, counts = one["anonymous"], [f"{one[key]['first']} to {one[key]['last']}" for key in COUNTS]
        bounds = f"{memory['low']:.2f} to {memory['high']:.2f}"
        numbers = f"{memory['first']:8.1f}{memory['last']:8.1f}{memory['per_1000_steps']:16.2f}{bounds:>18}{memory['later']:8.2f}"
        lines.append(f"{name:<24}{numbers}{counts[0]:>12}{counts[1]:>12}  {'flat' if one['flat'] else 'NOT FLAT'}")
    for name, one in found["folders"].items():
        files, held = one["files"], one["bytes"]
        lines.append(
            f"{name:<24}{files['first']} to {files['last']} files, {held['first'] / 1e6:.2f} to {held['last'] / 1e6:.2f} MB, at most"
            f" {held['most'] / 1e6:.2f}; {held['per_1000_steps'] / 1e6:.3f} MB/1,000 steps"
        )
    return "\n".join(lines)


def t95(freedom: int) -> float:
    """Return Student's t for a 95 % interval (Abramowitz and Stegun, 26.7.5), within 0.2 % from 9 degrees of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
