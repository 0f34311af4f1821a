"""Run every part in a process of its own, within its time, and write what is found as it is found.

Started by run.sh, by a Python that has torch and nothing of ours. Only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.gpu.bundle.parts import LIMIT_S, PARTS, Part  # noqa: E402
from tests.gpu.bundle.summary import MACHINE, SCHEMA  # noqa: E402

_REASON_CHARACTERS = 500
_NOTHING_RAN = 5
"""Status of pytest where no test ran, as where all are skipped."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended: ok, failed or skipped, and why the latter two."""

    status: str
    reason: str = ""
    seconds: float = 0.0
    limit_seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    """Returns 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--work", type=Path, required=True, help="scratch; run.sh has unpacked the wheels into its folder site")
    parser.add_argument("--only", help="names of parts, separated by commas, besides facts; default: all")
    parser.add_argument("--times", type=float, default=1.0, help="so many times the time for everything, on a slow machine")
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    wanted = {part.name for part in PARTS} if given.only is None else {*given.only.split(","), "facts"}
    if unknown := sorted(wanted - {part.name for part in PARTS}):
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(part.name for part in PARTS)}")
    begin, deadline = time.monotonic(), time.monotonic()
    logs = given.work / "logs"
    for folder in (given.results, logs):
        folder.mkdir(parents=True, exist_ok=True)
    machine, outcomes = dict.fromkeys(MACHINE), dict[str, Outcome]()
    environment = environment_of(given.work / "site")
    for part in PARTS:
        deadline += part.limit_s * given.times
        if part.name not in wanted:
            continue
        left = min(deadline, begin + LIMIT_S * given.times) - time.monotonic()
        reason = reason_to_skip(part, outcomes, machine["card"])
        outcome = Outcome("skipped", reason, 0.0, part.limit_s) if reason else start(part, left, given.work, logs, environment)
        outcomes[part.name] = outcome
        machine |= {key: outcome.figures[key]["value"] for key in MACHINE if part.name == "facts" and key in outcome.figures}
        print(f"{part.name:16} {outcome.status:8} {outcome.seconds:6.1f} s  {outcome.reason}", flush=True)
        about = {"schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": given.commit}
        about |= {"limit_seconds": LIMIT_S * given.times, "seconds": round(time.monotonic() - begin, 1), "machine": machine}
        found = {**about, "parts": {name: asdict(one) for name, one in outcomes.items()}}
        replace(given.results / "summary.json", lambda file, found=found: file.write_text(json.dumps(found, indent=1) + "\n"))
        replace(given.results / "logs.tar.gz", lambda file: pack(logs, file))
    return int(any(outcome.status == "failed" for outcome in outcomes.values()))


def replace(target: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    part = target.with_suffix(".tmp")
    write(part)
    part.replace(target)


def environment_of(site: Path) -> dict[str, str]:
    """Ours first, so that everything is the version it was tested with; torch and NumPy are the machine's, as the site has none."""
    path = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(path)}


def reason_to_skip(part: Part, outcomes: Mapping[str, Outcome], card: object) -> str:
    """Why a part cannot run here, or nothing."""
    for name in part.needs:
        if name in outcomes and outcomes[name].status != "ok":
            return f"{name} did not end well"
    return "no GPU here" if part.gpu and card is None else ""


def start(part: Part, left_s: float, work: Path, logs: Path, environment: Mapping[str, str]) -> Outcome:
    """Run a part; ended with everything it started when its time is over."""
    if left_s < 1:
        return Outcome("skipped", "no time was left", limit_seconds=part.limit_s)
    result, log, tests = work / f"{part.name}.json", logs / f"{part.name}.log", part.module == "pytest"
    command = [sys.executable, "-m", part.module, *part.arguments, *([] if tests else [str(result)])]
    begin = time.monotonic()
    given = {**environment, "ASYNCMOE_BUNDLE_SECONDS": f"{left_s:.0f}", "ASYNCMOE_BUNDLE_LOGS": str(logs)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=given, stdout=output, stderr=output, start_new_session=True)
        try:
            status: int | None = process.wait(left_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    seconds, said = round(time.monotonic() - begin, 1), last_line(log)
    told = {"skipped": "", "figures": {}} if tests or not result.exists() else json.loads(result.read_text())
    if tests:
        told["figures"] = {
            what: {"value": int(count), "unit": "tests"} for count, what in re.findall(r"(\d+) (passed|failed|skipped)", said)
        }
        told["skipped"] = said if status == _NOTHING_RAN else ""
    if status is None:
        return Outcome("failed", f"still running after {left_s:.0f} s", seconds, part.limit_s, told["figures"])
    if status != 0 and not told["skipped"]:
        return Outcome("failed", said or f"ended with status {status}", seconds, part.limit_s, told["figures"])
    return Outcome("skipped" if told["skipped"] else "ok", told["skipped"], seconds, part.limit_s, told["figures"])


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:_REASON_CHARACTERS] if lines else ""


def pack(logs: Path, target: Path) -> None:
    """All logs in one file."""
    with tarfile.open(target, "w:gz") as archive:
        archive.add(logs, arcname="logs")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its session; what made a session of its own ends with its parent (`asyncmoe.process`)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
