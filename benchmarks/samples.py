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
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncmoe.errors import InvariantBroken, UserError
from benchmarks.demo_cpu import demo
from benchmarks.provenance import here
from benchmarks.rig import SIZES, Rig
from benchmarks.samples_accounts import Accounts
from benchmarks.stretches import HEAD, LEAST_PAIRS, Pairs, in_whole_run, line, steps

CASES = {"short": (6, 12), "long": (128, 5)}
"""Longest response in tokens, and steps of a run in which calls are counted."""
_COUNTED = 10
"""Runs in which calls are counted."""
_LIMIT_S = 3600.0


def run(pairs: int = 60) -> dict[str, Any]:
    """Stretches of a run with samples of 2 groups of each step (the default) and without, with short and with long responses.

    Returns:
        {"date", "machine", "load", "pairs", "cases", "demo"}. Of a case: `Pairs.figures`; "accounted_ms" (CPU time of a step within the
        calls that keep samples) and "accounted" (that time over the whole of a step without them; blind to what they cost other code);
        "bytes_per_token" of the files, over all tokens of a run. "demo": `demo`, with the accounted time of the short case as
        "share_of_both" (over the CPU time that controller and trainer take for a step there) and "share_of_all" (with the engine), and the
        short case's added time over the latter (`in_whole_run`).

    Raises:
        UserError: too few pairs.
        InvariantBroken: the measuring process failed.
    """
    if pairs < LEAST_PAIRS:
        raise UserError("--pairs", got=pairs, expected=f"at least {LEAST_PAIRS}")
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
        **in_whole_run(cases[0], whole["all_ms"]),
    }
    return {**measured_at, "pairs": pairs, "groups_of_each_step": 2, **SIZES, "cases": cases, "demo": whole}


def table(found: dict[str, Any]) -> str:
    """A line a case."""
    lines = [f"{HEAD}{'accounted':>12}", *(f"{line(case)}{case['accounted']:12.2%}" for case in found["cases"])]
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
    return [_case(rig, name, most, counted, pairs) for name, (most, counted) in CASES.items()]


def _case(rig: Rig, name: str, most: int, counted_steps: int, pairs: int) -> dict[str, Any]:
    found = Pairs.of(rig.run(most, steps(pairs), 2, alternating=True).each, pairs)
    calls = Accounts()
    with calls.counting():
        counted = [rig.run(most, counted_steps, 2, calls) for _ in range(_COUNTED)]
    own = 1e3 * fmean(one.accounted for one in counted)
    return {
        "name": name,
        "longest_response": most,
        **found.figures(),
        "accounted": round(own / found.plain_ms, 5),
        "accounted_ms": round(own, 3),
        "bytes_per_token": round(fmean(one.size / one.tokens for one in counted), 2),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(measure(Path(scratch), int(sys.argv[2]))))
