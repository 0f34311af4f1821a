"""The command: gather facts, check and print them; or compare the reports of several nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from asyncmoe.doctor import report
from asyncmoe.doctor.examination import examine, failed
from asyncmoe.doctor.probes.gathering import gather
from asyncmoe.doctor.report import Report, differences
from asyncmoe.errors import ConfigError


def run(arguments: Sequence[str], *, as_json: bool, compare: bool) -> int:
    """Run `asyncmoe doctor [CONFIG] [KEY=VALUE]...`, or with `compare` compare report files, and return the exit status.

    Raises:
        ConfigError: fewer than two reports to compare.
        DataError: a file is not a report.
    """
    return _compare([Path(file) for file in arguments], as_json) if compare else _examine(arguments, as_json)


def _examine(arguments: Sequence[str], as_json: bool) -> int:
    config, *overrides = arguments or (None,)
    machine = gather(None if config is None else Path(config), [override for override in overrides if override is not None])
    found = Report(machine, examine(machine))
    if as_json:
        print(report.encode(found))
    else:
        report.show(found, Console())
    return int(failed(found.checks))


def _compare(files: Sequence[Path], as_json: bool) -> int:
    if len(files) < 2:
        raise ConfigError("asyncmoe doctor --compare", got=f"{len(files)} files", expected="the reports of at least two nodes")
    reports: dict[str, Report] = {}
    for file in files:
        found = report.read(file)
        host = found.machine.host
        reports[f"{host} ({file})" if host in reports else host] = found
    differ = differences(reports)
    if as_json:
        print(json.dumps({"nodes": list(reports), "differences": [asdict(one) for one in differ]}, indent=1))
    else:
        print("\n".join(map(str, differ)) or f"{len(reports)} nodes have the same versions")
    return int(bool(differ))
