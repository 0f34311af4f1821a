"""Asks for known vulnerabilities of what is pinned for both environments, with pip-audit.

usage: AUDIT_PYTHON requirements/audit.py      (make audit)

Exits with 1 if a package has one that `ACCEPTED` does not name. Without an answer for any package (no network, or an index without
advisories) it says so and exits with 0: nothing was found out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILES = ("train.txt", "dev.txt", "cpu.txt", "engine-cpu.txt", "engine-cpu-nodeps.txt")
ACCEPTED: Mapping[str, str] = {}
"""Id of a vulnerability -> why it does not concern us; an entry that nothing has any more is an error, too."""
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Audit:
    """What pip-audit found.

    Attributes:
        asked: number of packages with an answer.
        unknown: names of packages without one.
        found: (package and version, id of the vulnerability, versions without it), sorted.
    """

    asked: int
    unknown: tuple[str, ...]
    found: tuple[tuple[str, str, str], ...]


def read(answer: Mapping[str, Any]) -> Audit:
    """Read pip-audit's JSON (its README, "JSON format")."""
    known = [one for one in answer["dependencies"] if "skip_reason" not in one]
    found = {
        (f"{one['name']}=={one['version']}", hole["id"], ", ".join(hole["fix_versions"]) or "none yet")
        for one in known
        for hole in one["vulns"]
    }
    unknown = tuple(sorted({one["name"] for one in answer["dependencies"] if "skip_reason" in one}))
    return Audit(len(known), unknown, tuple(sorted(found)))


def judged(audit: Audit, accepted: Mapping[str, str]) -> tuple[int, list[str]]:
    """Return the exit status, and the lines to print."""
    if not audit.asked:
        return 0, [f"skipped: no answer for any of {len(audit.unknown)} packages (no network, or an index without advisories)"]
    why = {name: f": accepted, {reason}" for name, reason in accepted.items()}
    lines = [f"{package}: {name}, fixed in {fixed}{why.get(name, '')}" for package, name, fixed in audit.found]
    names = {name for _, name, _ in audit.found}
    refused = names - set(accepted)
    stale = [f"ACCEPTED names {name}, which nothing has: remove it" for name in accepted if name not in names]
    without = f", none for {len(audit.unknown)}: {', '.join(audit.unknown)}" if audit.unknown else ""
    lines += [*stale, f"answers for {audit.asked} packages{without}; {len(names)} vulnerabilities, {len(refused)} not accepted"]
    return int(bool(refused or stale)), lines


def ask(files: Sequence[str]) -> Audit:
    """Ask for each file by itself, because both environments pin some packages differently. Raise ConnectionError without a network."""
    audits = [_ask(file) for file in files]
    found = {hole for audit in audits for hole in audit.found}
    unknown = {name for audit in audits for name in audit.unknown}
    return Audit(sum(audit.asked for audit in audits), tuple(sorted(unknown)), tuple(sorted(found)))


def _ask(file: str) -> Audit:
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--output", answer.name]
        command = [sys.executable, "-m", "pip_audit", *options, "--requirement", str(HERE / file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        text = Path(answer.name).read_text()
    if not text:  # it exits with 1 both with a vulnerability and without a network
        raise ConnectionError((done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1])
    return read(json.loads(text))


def main() -> int:
    try:
        status, lines = judged(ask(FILES), ACCEPTED)
    except ConnectionError as error:
        status, lines = 0, [f"skipped: {error}"]
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
