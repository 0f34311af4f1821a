"""What the journal of the queue costs the controller and the trainer, in CPU seconds a token: both of them whole, around a scripted engine.

A program of its own (`python -m benchmarks.journal FILE PAIRS`), because Megatron is prepared in it (`benchmarks.rig`). The time of the
journal's threads counts too, because it is the process's; what the disk takes without the CPU does not. Engine, transport, weight sync and
records are left out: what a real run spends on them makes the share smaller.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncmoe.errors import InvariantBroken, UserError
from benchmarks.demo_cpu import demo
from benchmarks.provenance import here
from benchmarks.rig import SIZES, Rig
from benchmarks.stretches import HEAD, LEAST_PAIRS, Pairs, in_whole_run, line, steps

CASES = {"short": 6, "long": 128}
"""Longest response in tokens."""
_LIMIT_S, _WARM, _COUNTED_STEPS = 3600.0, 3, 12


def run(pairs: int = 60, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Stretches of a run with the journal, turns included, and without, with short and with long responses.

    Args:
        earlier: results on the same machine; their pairs count too, and their demo is not run again.

    Returns:
        {"date", "machine", "load", "pairs", "cases", "demo"}. Of a case: `Pairs.figures`, and "bytes_per_token" of the files on disk, over
        all tokens of a run. "demo": `demo`, and the short case's added time over the CPU time of a step there (`in_whole_run`).

    Raises:
        UserError: too few pairs.
        InvariantBroken: the measuring process failed.
    """
    if pairs < LEAST_PAIRS:
        raise UserError("--pairs", got=pairs, expected=f"at least {LEAST_PAIRS}")
    measured_at = here()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "journal.json"
        arguments = [sys.executable, "-m", "benchmarks.journal", str(file), str(pairs)]
        done = subprocess.run(arguments, timeout=_LIMIT_S, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InvariantBroken(f"bench journal: {done.stderr[-2000:]}")
        cases: list[dict[str, Any]] = json.loads(file.read_text())
        whole = demo(Path(folder)) if earlier is None else dict(earlier["demo"])
    if earlier is not None:
        cases = [one | Pairs.joined([before, one]).figures() for before, one in zip(earlier["cases"], cases, strict=True)]
        pairs += earlier["pairs"]
    return {**measured_at, "pairs": pairs, **SIZES, "cases": cases, "demo": whole | in_whole_run(cases[0], whole["all_ms"])}


def table(found: dict[str, Any]) -> str:
    """A line a case."""
    lines = [f"{HEAD}{'bytes a token':>15}", *(f"{line(case)}{case['bytes_per_token']:15.1f}" for case in found["cases"])]
    low, high = found["demo"]["measured_low"], found["demo"]["measured_high"]
    lines.append(f"in a run of the demo's sizes with its engine: {found['demo']['measured']:.2%} ({low:.2%} to {high:.2%})")
    return "\n".join(lines)


def measure(folder: Path, pairs: int) -> list[dict[str, Any]]:
    """See `run`; the list of cases."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rig, found = Rig(folder), []
    for name, most in CASES.items():
        rig.run(most, _WARM)
        figures = Pairs.of(rig.run(most, steps(pairs), alternating=True).each, pairs).figures()
        kept = rig.run(most, _COUNTED_STEPS)
        found.append({"name": name, "longest_response": most, **figures, "bytes_per_token": round(kept.size / kept.tokens, 2)})
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(measure(Path(scratch), int(sys.argv[2]))))
