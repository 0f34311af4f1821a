"""All checks, in display order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asyncmoe.doctor import built, devices, host, run, run_on_gpus, sandbox, software
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.verdict import Finding, Verdict

CHECKS: Mapping[str, Callable[[Machine], Verdict]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        *(software.python, software.torch, software.megatron_core, software.transformer_engine, software.apex, software.packages),
        *(built.extension, software.engine_python, software.sglang, devices.driver, built.cuda, devices.gpus, devices.nvlink, built.nccl),
        *(devices.infiniband, host.interfaces, host.hostname, host.loopback, host.clock, host.shm, host.open_files, host.memlock),
        *(sandbox.sandbox, run.configuration, run.ports, run.run_dir, run.own_code, run.model),
        *(run_on_gpus.transport, run_on_gpus.megatron_switches, run_on_gpus.placement, run_on_gpus.gpu_memory),
    )
}
"""Check by the name of its line, which is the function's. Every check returns a verdict for every machine."""


def examine(machine: Machine) -> tuple[Finding, ...]:
    """Return the finding of every check."""
    found = ((name, check(machine)) for name, check in CHECKS.items())
    return tuple(Finding(name, verdict.state, verdict.line, verdict.hint) for name, verdict in found)


def failed(findings: Sequence[Finding]) -> bool:
    """Return whether any finding is an error."""
    return any(finding.state == "error" for finding in findings)
