"""The report of one machine, as JSON for comparison with other nodes and as lines for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.text import Text

from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.verdict import Finding, State
from asyncmoe.errors import DataError

_STYLE: Mapping[State, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "not here": "dim"}
_INDENT = 30


@dataclass(frozen=True)
class Report:
    """The facts and findings that `asyncmoe doctor --json` prints."""

    machine: Machine
    checks: tuple[Finding, ...]


def encode(report: Report) -> str:
    """Encode a report as one JSON document."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def read(file: Path) -> Report:
    """Read a report from a file.

    Raises:
        DataError: the file cannot be read, or is not a report of this version of the doctor.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Report)
    except OSError as error:
        raise DataError(str(file), got=error.strerror, expected="what asyncmoe doctor --json printed") from error
    except msgspec.MsgspecError as error:
        cure = "write it again there: srun --output=doctor-%N.json asyncmoe doctor --json"
        raise DataError(str(file), got=str(error), expected="what asyncmoe doctor --json printed", cure=cure) from error


def show(report: Report, console: Console) -> None:
    """Print state, name and finding of each check on a line, with the fix below it."""
    for finding in report.checks:
        line = Text(f"{finding.state:<9}", style=_STYLE[finding.state])
        line.append(f" {finding.name:<19} ", style="bold").append(finding.found, style="")
        console.print(line, soft_wrap=True)
        if finding.cure is not None:
            console.print(Text(f"{'':{_INDENT}}-> {finding.cure}"), soft_wrap=True)
    counts = Counter(finding.state for finding in report.checks)
    told = ", ".join(f"{state}: {counts[state]}" for state in get_args(State))
    console.print(f"{report.machine.host}: {told}", highlight=False, soft_wrap=True)
