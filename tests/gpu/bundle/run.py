"""Run every part of a call in a process of its own, within its time, and write what is found as it is found.

Started by run.sh, by a Python that has torch and nothing of ours. Only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
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

from tests.gpu.bundle import manifest  # noqa: E402
from tests.gpu.bundle.parts import CALLS, Part  # noqa: E402
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
    parser.add_argument("--call", choices=CALLS, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--work", type=Path, required=True, help="scratch; run.sh has unpacked the wheels into its folder site")
    parser.add_argument("--only", help="names of parts, separated by commas; default: all that need not be asked for")
    parser.add_argument("--times", type=float, default=1.0, help="so many times the time for everything, on a slow machine")
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    parts = CALLS[given.call]
    always = {part.name for part in parts if part.again}
    wanted = {part.name for part in parts if not part.asked} if given.only is None else {*given.only.split(","), *always}
    if unknown := sorted(wanted - {part.name for part in parts}):
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(part.name for part in parts)}")
    logs, summary, packed = given.work / "logs" / given.call, given.results / "summary.json", given.results / f"logs-{given.call}.tar.gz"
    found = earlier(summary, given.commit)
    shutil.rmtree(logs, ignore_errors=True)
    for folder in (given.results, logs):
        folder.mkdir(parents=True, exist_ok=True)
    if packed.exists():
        with tarfile.open(packed) as archive:
            archive.extractall(logs.parent, filter="data")
    begin, deadline, environment = time.monotonic(), time.monotonic(), environment_of(given.work / "site")
    outcomes = {name: Outcome(**outcome) for name, outcome in found.get("parts", {}).items()}
    ran: list[Outcome] = []
    for part in parts:
        if part.name not in wanted:
            continue
        if part.name in outcomes and outcomes[part.name].status == "ok" and not part.again:
            print(f"{part.name:16} ok, as {summary} says", flush=True)
            continue
        deadline += part.limit_s * given.times
        reason = reason_to_skip(part, outcomes)
        left = deadline - time.monotonic()
        outcome = Outcome("skipped", reason, 0.0, part.limit_s) if reason else start(part, left, given.work, logs, environment)
        outcomes[part.name] = outcome
        ran.append(outcome)
        print(f"{part.name:16} {outcome.status:8} {outcome.seconds:6.1f} s  {outcome.reason}", flush=True)
        machine = {key: value["value"] for key, value in outcomes["facts"].figures.items() if key in MACHINE}
        about = {"schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": given.commit}
        calls = found.get("calls", {}) | {given.call: round(time.monotonic() - begin, 1)}
        whole = {**about, "machine": machine, "calls": calls, "parts": {name: asdict(one) for name, one in outcomes.items()}}
        replace(summary, lambda file, whole=whole: file.write_text(json.dumps(whole, indent=1) + "\n"))
        replace(packed, lambda file: pack(logs, file))
        if part.name == "facts" and (why := manifest.unfit(given.call, outcome.figures.get("capability", {}).get("value"))):
            sys.exit(why)
    return int(any(outcome.status == "failed" for outcome in ran))


def earlier(summary: Path, commit: str) -> dict[str, Any]:
    """What earlier calls found, which is kept; ends with a line if it is of another commit."""
    found: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    if found and found["commit"] != commit:
        sys.exit(f"{summary}: got results of commit {found['commit']}, expected those of {commit}; name another folder")
    return found


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


def reason_to_skip(part: Part, outcomes: Mapping[str, Outcome]) -> str:
    """Why a part cannot run here, or nothing."""
    for name in part.needs:
        if name in outcomes and outcomes[name].status != "ok":
            return f"{name} did not end well"
    return "no GPU here" if part.gpu and outcomes["facts"].figures.get("card", {}).get("value") is None else ""


def start(part: Part, left_s: float, work: Path, logs: Path, environment: Mapping[str, str]) -> Outcome:
    """Run a part; ended with everything it started when its time is over."""
    if left_s < 1:
        return Outcome("skipped", "no time was left", limit_seconds=part.limit_s)
    result, log, tests = work / f"{part.name}.json", logs / f"{part.name}.log", part.module == "pytest"
    command = [sys.executable, "-m", part.module, *part.arguments, *([] if tests else [str(result)])]
    result.unlink(missing_ok=True)  # of an earlier call
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
    told: dict[str, Any] = {"skipped": "", "figures": {}} if tests or not result.exists() else json.loads(result.read_text())
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
    """All logs of a call in one file."""
    with tarfile.open(target, "w:gz") as archive:
        archive.add(logs, arcname=logs.name)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its session; what made a session of its own ends with its parent (`asyncmoe.process`)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
