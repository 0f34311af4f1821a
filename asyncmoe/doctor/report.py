"""The report of one machine, as JSON and as lines for a person, and the differences between the reports of several nodes of a cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.text import Text

from asyncmoe.doctor import versions
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.python_facts import PythonFacts
from asyncmoe.doctor.verdict import Finding, State
from asyncmoe.errors import DataError
from asyncmoe.installed import fix

_STYLE: Mapping[State, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "not here": "dim"}
_INDENT = 30
_NONE = "none"


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
        hint = "write it again there: srun --output=doctor-%N.json asyncmoe doctor --json"
        raise DataError(str(file), got=str(error), expected="what asyncmoe doctor --json printed", hint=hint) from error


def show(report: Report, console: Console) -> None:
    """Print state, name and finding of each check on a line, with the fix below it."""
    for finding in report.checks:
        line = Text(f"{finding.state:<9}", style=_STYLE[finding.state])
        line.append(f" {finding.name:<19} ", style="bold").append(finding.found, style="")
        console.print(line, soft_wrap=True)
        if finding.hint is not None:
            console.print(Text(f"{'':{_INDENT}}-> {finding.hint}"), soft_wrap=True)
    counts = Counter(finding.state for finding in report.checks)
    told = ", ".join(f"{state}: {counts[state]}" for state in get_args(State))
    console.print(f"{report.machine.host}: {told}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Difference:
    """Nodes whose value differs from the majority's.

    Attributes:
        what: the compared aspect, e.g. "torch of the trainer's Python".
        nodes: the deviating nodes, all with the same value.
        found, expected: the value of these nodes and the most frequent value (the newer in a tie).
        others: number of nodes with the expected value.
    """

    what: str
    nodes: tuple[str, ...]
    found: str
    expected: str
    others: int
    hint: str

    def __str__(self) -> str:
        verb = "has" if len(self.nodes) == 1 else "have"
        most = f"{self.others} {'other' if self.others == 1 else 'others'}"
        return f"{self.what}: {', '.join(self.nodes)} {verb} {self.found}, {most} {self.expected}; {self.hint} on {', '.join(self.nodes)}"


def differences(reports: Mapping[str, Report]) -> list[Difference]:
    """Return the differences between nodes, an entry for each deviating value.

    A node without a GPU driver, NCCL or a configuration does not deviate in these, because it may have another role.

    Args:
        reports: report by node name.
    """
    told = {node: _compared(report.machine) for node, report in reports.items()}
    aspects = {what: aspect for aspects in told.values() for what, aspect in aspects.items()}
    found: list[Difference] = []
    for what, (_, hint, optional) in aspects.items():
        values = {node: aspects[what][0] if what in aspects else None for node, aspects in told.items()}
        has = {node: value or _NONE for node, value in values.items() if value is not None or not optional}
        found.extend(_deviations(what, has, hint))
    return found


_Aspect = tuple[str | None, Callable[[str], str], bool]
"""Value on a node, the fix as a function of the expected value, and whether a node may lack the value."""


def _compared(machine: Machine) -> dict[str, _Aspect]:
    """Return every aspect in which nodes must agree, by name."""
    aspects: dict[str, _Aspect] = {"asyncmoe": (machine.asyncmoe, lambda _: "check out the same commit", False)}
    aspects |= _of_python(machine, machine.trainer, "the trainer's")
    if machine.engine is not None:
        aspects |= _of_python(machine, machine.engine, "the engines'")
    digest = machine.run.digest if machine.run else None
    aspects["NVIDIA's driver"] = machine.nvidia.driver, lambda value: f"install {value}", True
    aspects["configuration"] = digest and digest[:12], lambda _: "use the same CONFIG, and the same KEY=VALUE", True
    return aspects


def _of_python(machine: Machine, side: PythonFacts, whose: str) -> Iterator[tuple[str, _Aspect]]:
    """Yield the aspects of one environment: Python, packages, build of the extension, NCCL."""
    again = f"run {fix('train')} again"
    yield f"{whose} Python", (side.version, lambda value: f"install Python {value}", False)
    for name in machine.requirements:
        if name != "python":
            yield f"{name} of {whose} Python", (side.packages.get(name), lambda value, name=name: _install(name, value), False)  # type: ignore[misc]
    if side.torch is not None:
        cuda = f"CUDA {side.torch.cuda}" if side.torch.cuda else "the CPU"
        yield f"build of torch in {whose} Python", (f"one for {cuda}", lambda value: f"install {value}", False)
    if side.extension is not None:
        built = " ".join(digest[:12] for digest in side.extension.built_from)
        yield (
            f"asyncmoe's extension in {whose} Python",
            (built and f"sources {built}", lambda _: f"check out the same commit and {again}", False),
        )
    if side.nccl is not None and side.nccl.version is not None:
        yield f"NCCL of {whose} Python", (versions.nccl(side.nccl.version), lambda value: f"install NCCL {value}", True)


def _install(name: str, version: str) -> str:
    return f"uninstall {name}" if version == _NONE else f"install {name} {version}"


def _deviations(what: str, has: Mapping[str, str], hint: Callable[[str], str]) -> Iterator[Difference]:
    nodes_of: dict[str, list[str]] = {}
    for node, value in has.items():
        nodes_of.setdefault(value, []).append(node)
    if len(nodes_of) < 2:
        return
    expected = max(nodes_of, key=lambda value: (len(nodes_of[value]), _newness(value)))
    for value, nodes in nodes_of.items():
        if value != expected:
            yield Difference(what, tuple(nodes), value, expected, len(nodes_of[expected]), hint(expected))


def _newness(value: str) -> tuple[bool, list[int], str]:
    return value != _NONE, [int(number) for number in re.findall(r"\d+", value)], value
