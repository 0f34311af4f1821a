"""What the journal of the queue costs the controller and the trainer, in CPU seconds a token: both of them whole, around a scripted engine.

A program of its own (`python -m benchmarks.journal FILE PAIRS`), as `benchmarks.samples`, whose parts it runs. The time of the journal's
threads counts too, because it is the process's; what the disk takes without the CPU does not.
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
from benchmarks.provenance import here
from benchmarks.rig import SIZES, Rig
from benchmarks.samples import CASES, interval

_LEAST_PAIRS, _LIMIT_S, _WARM = 3, 3600.0, 3


def run(pairs: int = 30) -> dict[str, Any]:
    """Runs with and without the journal in alternating order, with short and with long responses. A claim needs 10 pairs or more.

    Returns:
        {"date", "machine", "load", "pairs", "cases"}. Of a case: "tokens" of a step; "cpu_us_per_token" without the journal; "share" (mean
        over pairs of with / without - 1), "low" and "high" (its 95 % interval); "bytes_per_token" of the payloads on disk.

    Raises:
        UserError: too few pairs.
        InvariantBroken: the measuring process failed.
    """
    if pairs < _LEAST_PAIRS:
        raise UserError("--pairs", got=pairs, expected=f"at least {_LEAST_PAIRS}")
    measured_at = here()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "journal.json"
        arguments = [sys.executable, "-m", "benchmarks.journal", str(file), str(pairs)]
        done = subprocess.run(arguments, timeout=_LIMIT_S, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InvariantBroken(f"bench journal: {done.stderr[-2000:]}")
        return {**measured_at, "pairs": pairs, **SIZES, "cases": json.loads(file.read_text())}


def table(found: dict[str, Any]) -> str:
    """A line a case."""
    lines = [f"{'':<8}{'us a token':>12}{'journal':>10}{'95 % interval':>20}{'bytes a token':>15}"]
    for case in found["cases"]:
        interval = f"{case['low']:.2%} to {case['high']:.2%}"
        lines.append(f"{case['name']:<8}{case['cpu_us_per_token']:12.1f}{case['share']:10.2%}{interval:>20}{case['bytes_per_token']:15.1f}")
    return "\n".join(lines)


def measure(folder: Path, pairs: int) -> list[dict[str, Any]]:
    """See `run`; the list of cases."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rig, found = Rig(folder), []
    for name, (most, steps) in CASES.items():
        rig.run(most, _WARM, 0, journaled=True)
        measured = []
        for number in range(pairs):
            order = (False, True) if number % 2 else (True, False)
            by_kind = {journaled: rig.run(most, steps, 0, journaled=journaled) for journaled in order}
            measured.append((by_kind[False], by_kind[True]))
        shares = [kept.per_token / plain.per_token - 1 for plain, kept in measured]
        share, half = interval(shares)
        found.append(
            {
                "name": name,
                "longest_response": most,
                "tokens": round(fmean(plain.tokens / steps for plain, _ in measured)),
                "cpu_us_per_token": round(1e6 * fmean(plain.per_token for plain, _ in measured), 2),
                "share": round(share, 5),
                "low": round(share - half, 5),
                "high": round(share + half, 5),
                "bytes_per_token": round(fmean(kept.size / kept.tokens for _, kept in measured), 2),
                "shares": [round(one, 5) for one in shares],
            }
        )
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(measure(Path(scratch), int(sys.argv[2]))))
