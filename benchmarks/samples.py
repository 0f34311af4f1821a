"""What keeping samples costs the controller and the trainer, in CPU seconds a token: both of them whole, around a scripted engine.

A program of its own (`python -m benchmarks.samples FILE PAIRS`), because Megatron is prepared in it (`benchmarks.rig`). Engine, transport,
weight sync and records, which samples do not touch, are left out: what a real run spends on them makes the share smaller.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from asyncmoe.errors import InvariantBroken, UserError
from benchmarks.provenance import here
from benchmarks.rig import SETTLE, SIZES, Rig, keeps
from benchmarks.samples_accounts import Accounts
from benchmarks.samples_demo import demo

CASES = {"short": (6, 12), "long": (128, 5)}
"""Longest response in tokens, and steps of a run in which calls are counted."""
_STRETCH, _EDGE = 6, 2
"""Steps of a stretch, and those at its beginning that are not measured: groups begin up to two steps before they are trained."""
_COUNTED = 10
"""Runs in which calls are counted."""
_LEAST_PAIRS = 10
_LIMIT_S = 3600.0


def run(pairs: int = 60) -> dict[str, Any]:
    """Stretches of a run with samples of 2 groups of each step (the default) and without, with short and with long responses.

    The CPU time of a step differs from run to run by more than samples cost; the two stretches of a pair lie side by side in one run.

    Returns:
        {"date", "machine", "load", "pairs", "cases", "demo"}. Of a case: "tokens" of a step; "cpu_us_per_token" without samples (mean over
        stretches); "share" (mean over pairs of with / without - 1), "low" and "high" (its 95 % interval); "added_ms", "added_low_ms",
        "added_high_ms" (CPU time that they add to a step, mean over pairs and its 95 % interval); "accounted_ms" (CPU time of a step within
        the calls that keep samples) and "accounted" (that time over the whole of a step without them; blind to what they cost other code);
        "bytes_per_token" of the files, over all tokens of a run; "plain_us", "kept_us" (CPU time of a token in the stretches of each pair).
        "demo": `demo`, with the accounted time of the short case as "share_of_both" (over the CPU time that controller and trainer take for
        a step there) and "share_of_all" (with the engine), and the short case's added time over the latter as "measured", "measured_low"
        and "measured_high".

    Raises:
        UserError: too few pairs.
        InvariantBroken: the measuring process failed.
    """
    if pairs < _LEAST_PAIRS:
        raise UserError("--pairs", got=pairs, expected=f"at least {_LEAST_PAIRS}")
    measured_at = here()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.json"
        arguments = [sys.executable, "-m", "benchmarks.samples", str(file), str(pairs)]
        done = subprocess.run(arguments, timeout=_LIMIT_S, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InvariantBroken(f"bench samples: {done.stderr[-2000:]}")
        cases: list[dict[str, Any]] = json.loads(file.read_text())
        whole = demo(Path(folder))
    ours = whole["controller_ms"] + whole["trainer_ms"]
    whole |= {
        "share_of_both": round(cases[0]["accounted_ms"] / ours, 5),
        "share_of_all": round(cases[0]["accounted_ms"] / whole["all_ms"], 5),
        "measured": round(cases[0]["added_ms"] / whole["all_ms"], 5),
        "measured_low": round(cases[0]["added_low_ms"] / whole["all_ms"], 5),
        "measured_high": round(cases[0]["added_high_ms"] / whole["all_ms"], 5),
    }
    return {**measured_at, "pairs": pairs, "groups_of_each_step": 2, **SIZES, "cases": cases, "demo": whole}


def table(found: dict[str, Any]) -> str:
    """A line a case."""
    lines = [f"{'':<8}{'us a token':>12}{'samples':>10}{'95 % interval':>20}{'accounted':>12}"]
    for case in found["cases"]:
        interval = f"{case['low']:.2%} to {case['high']:.2%}"
        lines.append(f"{case['name']:<8}{case['cpu_us_per_token']:12.1f}{case['share']:10.2%}{interval:>20}{case['accounted']:12.2%}")
    both, all_ = found["demo"]["share_of_both"], found["demo"]["share_of_all"]
    lines.append(f"accounted, in a run of the demo's sizes: {both:.2%} of controller and trainer, {all_:.2%} with the engine")
    low, high = found["demo"]["measured_low"], found["demo"]["measured_high"]
    lines.append(f"measured, in a run of the demo's sizes with its engine: {found['demo']['measured']:.2%} ({low:.2%} to {high:.2%})")
    return "\n".join(lines)


def measure(folder: Path, pairs: int) -> list[dict[str, Any]]:
    """See `run`; the list of cases."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rig = Rig(folder)
    return [_case(rig, name, most, steps, pairs) for name, (most, steps) in CASES.items()]


def _case(rig: Rig, name: str, most: int, steps: int, pairs: int) -> dict[str, Any]:
    taken = rig.run(most, SETTLE + 2 * pairs * _STRETCH, 2, stretch=_STRETCH)
    spent = [_per_token(taken.each[SETTLE + i * _STRETCH :][_EDGE:_STRETCH]) for i in range(2 * pairs)]
    kept = [spent[i] if keeps(i) else spent[i + 1] for i in range(0, 2 * pairs, 2)]
    plain = [spent[i + 1] if keeps(i) else spent[i] for i in range(0, 2 * pairs, 2)]
    tokens = fmean(tokens for _, tokens in taken.each[SETTLE:])
    calls = Accounts()
    with calls.counting():
        counted = [rig.run(most, steps, 2, calls) for _ in range(_COUNTED)]
    own, per_step = fmean(one.accounted for one in counted), fmean(plain) * tokens
    share, half = interval([one / other - 1 for one, other in zip(kept, plain, strict=True)])
    more, either_way = interval([(one - other) * tokens for one, other in zip(kept, plain, strict=True)])
    return {
        "name": name,
        "longest_response": most,
        "tokens": round(tokens),
        "cpu_us_per_token": round(1e6 * fmean(plain), 2),
        "share": round(share, 5),
        "low": round(share - half, 5),
        "high": round(share + half, 5),
        "added_ms": round(1e3 * more, 3),
        "added_low_ms": round(1e3 * (more - either_way), 3),
        "added_high_ms": round(1e3 * (more + either_way), 3),
        "accounted": round(own / per_step, 5),
        "accounted_ms": round(1e3 * own, 3),
        "bytes_per_token": round(fmean(one.size / one.tokens for one in counted), 2),
        "plain_us": [round(1e6 * one, 2) for one in plain],
        "kept_us": [round(1e6 * one, 2) for one in kept],
    }


def _per_token(steps: Sequence[tuple[float, int]]) -> float:
    return sum(seconds for seconds, _ in steps) / sum(tokens for _, tokens in steps)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    return fmean(values), t95(len(values) - 1) * stdev(values) / len(values) ** 0.5


def t95(freedom: int) -> float:
    """Return Student's t for a 95 % interval (Abramowitz and Stegun, 26.7.5), within 0.2 % from 9 degrees of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(measure(Path(scratch), int(sys.argv[2]))))
