"""Run every part in a process of its own, within its time, and write what is found as it is found.

Started by run.sh, by a Python that has torch and nothing of ours. Only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.gpu.bundle import manifest  # noqa: E402
from tests.gpu.bundle.parts import LIMIT_S, PARTS, Part  # noqa: E402
from tests.gpu.bundle.summary import MACHINE, Figure, Outcome, Summary, read_outcome  # noqa: E402

_REASON_CHARACTERS = 500


def main() -> int:
    """Returns 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, help="unpacked first; leave out where everything is installed")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--work", type=Path, required=True, help="scratch")
    parser.add_argument("--only", help="names of parts, separated by commas, besides facts; default: all")
    parser.add_argument("--times", type=float, default=1.0, help="so many times the time for everything, on a slow machine")
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    wanted = None if given.only is None else {*given.only.split(","), "facts"}
    if unknown := sorted((wanted or set()) - {part.name for part in PARTS}):
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(part.name for part in PARTS)}")
    if not given.times > 0:
        parser.error(f"--times: got {given.times}, expected a positive number")
    if sys.version_info[:2] != tuple(map(int, manifest.PYTHON.split("."))) and given.wheels is not None:
        parser.error(f"Python: got {sys.version.split()[0]}, expected {manifest.PYTHON}, for which the wheels are; set PYTHON")
    begin = time.monotonic()
    try:
        given.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"RESULTS: {error}; expected a folder that can be written")
    logs = given.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    summary = Summary(datetime.datetime.now(datetime.UTC).date().isoformat(), given.commit, LIMIT_S * given.times)
    site = given.work / "site"
    if given.wheels is not None:
        summary.parts["wheels"] = unpacked = unpack(given.wheels, site)
        if unpacked.status == "failed":
            summary.write(given.results / "summary.json")
            print(f"wheels: {unpacked.reason}", file=sys.stderr)
            return 1
    environment = environment_of(site)
    deadline = time.monotonic()  # what unpacking took is of the whole, not of the parts
    for part in PARTS:
        deadline += part.limit_s * given.times
        if wanted is not None and part.name not in wanted:
            continue
        left = min(deadline, begin + LIMIT_S * given.times) - time.monotonic()
        outcome = reason_to_skip(part, summary) or start(part, left, given.work, logs, environment)
        summary.parts[part.name] = outcome
        if part.name == "facts":
            summary.machine.update({key: outcome.figures[key].value for key in MACHINE if key in outcome.figures})
        summary.seconds = round(time.monotonic() - begin, 1)
        print(f"{part.name:16} {outcome.status:8} {outcome.seconds:6.1f} s  {outcome.reason}", flush=True)
        summary.write(given.results / "summary.json")
        pack(logs, given.results / "logs.tar.gz")
    return int(any(outcome.status == "failed" for outcome in summary.parts.values()))


def unpack(wheels: Path, site: Path) -> Outcome:
    """What pip would put into a target folder, without pip: a wheel is a zip archive of it. Never anything of `manifest.ASSUMED`."""
    begin = time.monotonic()
    found = sorted(wheels.glob("*.whl"))
    if not found:
        return Outcome("failed", f"{wheels}: got no wheels, expected those of make.py; copy the whole folder")
    assumed = [wheel.name for wheel in found if manifest.normal(wheel.name.split("-")[0]) in manifest.ASSUMED]
    if assumed:
        return Outcome("failed", f"wheels: got {', '.join(assumed)}, which would hide this machine's own")
    for wheel in found:
        if not zipfile.is_zipfile(wheel):
            return Outcome("failed", f"{wheel.name}: got a damaged wheel, expected it as make.py wrote it; copy the folder again")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                inside = name.split("/", 2)
                if not inside[0].endswith(".data"):
                    archive.extract(name, site)
                elif inside[1] in ("purelib", "platlib"):
                    target = site / inside[2]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
    return Outcome("ok", seconds=round(time.monotonic() - begin, 1), figures={"unpacked": Figure(len(found), "wheels")})


def environment_of(site: Path) -> dict[str, str]:
    """Ours first, so that everything is the version it was tested with; torch and NumPy are the machine's, as the site has none."""
    path = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(path)}


def reason_to_skip(part: Part, summary: Summary) -> Outcome | None:
    for name in part.needs:
        if name in summary.parts and summary.parts[name].status != "ok":
            return Outcome("skipped", f"{name} did not end well", limit_seconds=part.limit_s)
    if part.gpu and summary.machine["card"] is None:
        return Outcome("skipped", "no GPU here", limit_seconds=part.limit_s)
    return None


def start(part: Part, left_s: float, work: Path, logs: Path, environment: Mapping[str, str]) -> Outcome:
    """Run a part; ended with everything it started when its time is over."""
    if left_s < 1:
        return Outcome("skipped", "no time was left", limit_seconds=part.limit_s)
    result, log = work / f"{part.name}.json", logs / f"{part.name}.log"
    command = [sys.executable, "-m", part.module, *part.arguments, str(result)]
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
    seconds = round(time.monotonic() - begin, 1)
    skipped, figures = read_outcome(result)
    if status is None:
        return Outcome("failed", f"still running after {left_s:.0f} s", seconds, part.limit_s, figures)
    if status != 0:
        return Outcome("failed", last_line(log) or f"ended with status {status}", seconds, part.limit_s, figures)
    return Outcome("skipped" if skipped else "ok", skipped, seconds, part.limit_s, figures)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:_REASON_CHARACTERS] if lines else ""


def pack(logs: Path, target: Path) -> None:
    """All logs in one file, whole or not at all."""
    part = target.with_suffix(".tmp")
    with tarfile.open(part, "w:gz") as archive:
        archive.add(logs, arcname="logs")
    part.replace(target)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its session; what made a session of its own ends with its parent (`asyncmoe.process`)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
