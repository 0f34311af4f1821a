"""The report of a node, and the versions in which the nodes of a cluster must agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asyncmoe.doctor import versions
from asyncmoe.doctor.facts import Machine, PythonFacts
from asyncmoe.doctor.finding import Finding


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
