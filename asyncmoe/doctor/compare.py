"""Reports of several nodes of a cluster, and in what the nodes differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncmoe.doctor import versions
from asyncmoe.doctor.facts import Machine, PythonFacts
from asyncmoe.doctor.finding import Finding
from asyncmoe.errors import DataError


@dataclass(frozen=True)
class Report:
    """What `asyncmoe doctor --json` prints of a node.

    Attributes:
        host: its name.
        versions: all in which nodes must agree, by name; a node lacks what another role need not have.
        checks: what was found, by the name of the check.
    """

    host: str
    versions: Mapping[str, str]
    checks: Mapping[str, Finding]


def read(file: Path) -> Report:
    """Read a report from a file.

    Raises:
        DataError: the file cannot be read, or is not a report of this version of the doctor.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Report)
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        hint = "write it again there: srun --output=doctor-%N.json asyncmoe doctor --json"
        raise DataError(str(file), got=got, expected="what asyncmoe doctor --json printed", hint=hint) from error


def versions_of(machine: Machine, digest: str | None) -> dict[str, str]:
    """Return what must be equal on all nodes of a run.

    Args:
        digest: of the configuration; None without one.
    """
    found = {"asyncmoe": machine.asyncmoe}
    for whose, python in machine.pythons:
        found |= _of_python(machine, python, f"of {whose} Python")
    if machine.nvidia.driver is not None:
        found["NVIDIA's driver"] = machine.nvidia.driver
    return found if digest is None else {**found, "configuration": digest[:12]}


def _of_python(machine: Machine, python: PythonFacts, of: str) -> Iterator[tuple[str, str]]:
    yield f"version {of}", python.version or "none"
    for name in machine.requirements:
        yield f"{name} {of}", python.packages.get(name, "none")
    if python.torch is not None:
        yield f"CUDA of torch {of}", python.torch.cuda or "none"
    if python.extension is not None:
        yield f"sources of asyncmoe's extension {of}", " ".join(digest[:12] for digest in python.extension.built_from)
    if python.nccl is not None and python.nccl.version is not None:
        yield f"NCCL {of}", versions.nccl(python.nccl.version)


def differences(nodes: Mapping[str, Report]) -> list[str]:
    """Return a line for each version and the nodes whose value is not that of most nodes.

    Args:
        nodes: report by the name of the node.
    """
    lines = []
    for what in dict.fromkeys(what for report in nodes.values() for what in report.versions):
        has = {node: report.versions[what] for node, report in nodes.items() if what in report.versions}
        (most, count), *others = Counter(has.values()).most_common()
        for value, _ in others:
            named = ", ".join(node for node, one in has.items() if one == value)
            lines.append(f"{what}: {named}: got {value}, expected {most}, as on {count} of {len(has)} nodes; make it equal there")
    return lines
