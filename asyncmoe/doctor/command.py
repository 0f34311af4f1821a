"""The command: check this machine and print what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from asyncmoe.doctor.examination import examine
from asyncmoe.doctor.finding import Finding, State

_STYLE: Mapping[State, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "not here": "dim"}


def check(words: Sequence[str], *, as_json: bool) -> int:
    """Run `asyncmoe doctor [CONFIG] [KEY=VALUE]...`, and return the exit status: 1 if a check found an error."""
    found = examine(words)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        show(found.host, found.checks, Console())
    return int(any(finding.state == "error" for finding in found.checks.values()))


def show(host: str, checks: Mapping[str, Finding], console: Console) -> None:
    """Print state, name and finding of each check on a line, with the fix below it."""
    for name, finding in checks.items():
        line = Text(f"{finding.state:<9}", style=_STYLE[finding.state])
        console.print(line.append(f" {name:<19} ", style="bold").append(finding.line, style=""), soft_wrap=True)
        if finding.hint is not None:
            console.print(Text(f"{'':30}-> {finding.hint}"), soft_wrap=True)
    counts = Counter(finding.state for finding in checks.values())
    console.print(f"{host}: {', '.join(f'{state}: {counts[state]}' for state in _STYLE)}", highlight=False, soft_wrap=True)
