"""All checks, in display order, and the report of their findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.text import Text

from asyncmoe import plugins
from asyncmoe.doctor import fit, gpus, host, infiniband, packages, run
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.finding import Finding, State
from asyncmoe.doctor.gather import gather

CHECKS: Mapping[str, Callable[[Machine], Finding]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        *(packages.packages, packages.torch, packages.extension, packages.engine_python, packages.sglang, packages.cuda),
        *(packages.transformer_engine, gpus.gpus, fit.megatron_switches, fit.placement, fit.gpu_memory, packages.nccl),
    )
}
"""Checks on a machine's facts, by the function's name, which also names the line in the report. Root causes precede their consequences. An
error of one of these checks stops a run on GPUs."""

_STYLE: Mapping[State, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "not here": "dim"}


@dataclass(frozen=True)
class Report:
    """Report on a node, as `asyncmoe doctor --json` prints it.

    Attributes:
        host: its name.
        checks: findings by name of the check.
    """

    host: str
    checks: Mapping[str, Finding]


def examine(words: Sequence[str]) -> Report:
    """Examine this machine.

    Args:
        words: a configuration file and KEY=VALUE overrides; may be empty.
    """
    config, valid = run.configuration(words)
    safe = valid.state == "ok" or config is None or not plugins.is_name(config.model.family)  # a family's code may end this process
    machine = gather(config, with_model=safe)
    checks = {name: check(machine) for name, check in CHECKS.items()}
    checks["infiniband"] = infiniband.infiniband(machine.nics)
    checks |= {"shm": host.shm(), "open-files": host.open_files(config), "sandbox": host.sandbox()}
    checks["configuration"] = valid
    if config is not None:
        checks |= {"network": run.network(config), "ports": run.ports(config), "run-dir": run.run_dir(config, machine.run)}
    return Report(machine.host, checks)


def report(words: Sequence[str], *, as_json: bool) -> int:
    """Run `asyncmoe doctor [CONFIG] [KEY=VALUE]...`, and return the exit status: 1 if a check found an error."""
    found = examine(words)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        _show(found)
    return int(any(finding.state == "error" for finding in found.checks.values()))


def _show(found: Report) -> None:
    """Print state, name and finding of each check on a line, with the fix below it."""
    console = Console()
    for name, finding in found.checks.items():
        line = Text(f"{finding.state:<9}", style=_STYLE[finding.state])
        console.print(line.append(f" {name:<19} ", style="bold").append(finding.line, style=""), soft_wrap=True)
        if finding.hint is not None:
            console.print(Text(f"{'':30}-> {finding.hint}"), soft_wrap=True)
    counts = Counter(finding.state for finding in found.checks.values())
    console.print(f"{found.host}: {', '.join(f'{state}: {counts[state]}' for state in _STYLE)}", highlight=False, soft_wrap=True)
