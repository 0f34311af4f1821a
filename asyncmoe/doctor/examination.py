"""All checks, in display order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asyncmoe.doctor import built, devices, host, run, run_on_gpus, sandbox, software
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.verdict import Finding, Verdict

CHECKS: Mapping[str, Callable[[Machine], Verdict]] = {
    "python": software.python,
    "torch": software.torch,
    "megatron-core": software.megatron_core,
    "transformer-engine": software.transformer_engine,
    "apex": software.apex,
    "packages": software.packages,
    "extension": built.extension,
    "engine-python": software.engine_python,
    "sglang": software.sglang,
    "driver": devices.driver,
    "cuda": built.cuda,
    "gpus": devices.gpus,
    "nvlink": devices.nvlink,
    "nccl": built.nccl,
    "infiniband": devices.infiniband,
    "interfaces": host.interfaces,
    "hostname": host.hostname,
    "loopback": host.loopback,
    "clock": host.clock,
    "shm": host.shm,
    "open-files": host.open_files,
    "memlock": host.memlock,
    "sandbox": sandbox.sandbox,
    "configuration": run.configuration,
    "ports": run.ports,
    "run-dir": run.run_dir,
    "own-code": run.own_code,
    "model": run.model,
    "transport": run_on_gpus.transport,
    "megatron-switches": run_on_gpus.megatron_switches,
    "placement": run_on_gpus.placement,
    "gpu-memory": run_on_gpus.gpu_memory,
}
"""Check by the name of its line. Every check returns a verdict for every machine."""


def examine(machine: Machine) -> tuple[Finding, ...]:
    """Return the finding of every check."""
    found = ((name, check(machine)) for name, check in CHECKS.items())
    return tuple(Finding(name, verdict.state, verdict.line, verdict.hint) for name, verdict in found)


def failed(findings: Sequence[Finding]) -> bool:
    """Return whether any finding is an error."""
    return any(finding.state == "error" for finding in findings)
