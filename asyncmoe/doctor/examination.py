"""All checks, in display order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asyncmoe import plugins
from asyncmoe.doctor import built, fit, gpus, host, packages, run
from asyncmoe.doctor.compare import Report, versions_of
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.finding import Finding
from asyncmoe.doctor.gather import gather

CHECKS: Mapping[str, Callable[[Machine], Finding]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        *(packages.packages, packages.torch, built.extension, packages.engine_python, packages.sglang),
        *(built.cuda, packages.transformer_engine, gpus.gpus, fit.megatron_switches, fit.placement, fit.gpu_memory, built.nccl),
    )
}
"""What is judged by the facts of a machine, by the name of its line, which is the function's: a root cause precedes its consequences.
Errors of these stop a run on GPUs."""


def examine(words: Sequence[str]) -> Report:
    """Examine this machine.

    Args:
        words: the file of a configuration and KEY=VALUE of the command line; empty without one.
    """
    config, valid = run.configuration(words)
    safe = valid.state == "ok" or config is None or not plugins.is_name(config.model.family)  # the code of a family may end this process
    machine = gather(config, with_model=safe)
    checks = {name: check(machine) for name, check in CHECKS.items()}
    checks |= {"infiniband": host.infiniband(), "shm": host.shm(), "open-files": host.open_files(config), "sandbox": host.sandbox()}
    checks["configuration"] = valid
    if config is not None:
        checks |= {"network": run.network(config), "ports": run.ports(config), "run-dir": run.run_dir(config, machine.run)}
    return Report(machine.host, versions_of(machine, config.digest if config is not None else None), checks)
