"""Checks of a configuration on this machine: its ports, run directory and model."""

from __future__ import annotations

from asyncmoe.doctor import verdict
from asyncmoe.doctor.facts import Disk, Machine, RunFacts
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.storage import size

_NONE = "no CONFIG was given"
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "smb3", "9p", "virtiofs", "panfs", "afs", "glusterfs")
_FLEETING = ("tmpfs", "ramfs", "overlay")
_FREE_FILES = 10_000


def configuration(machine: Machine) -> Verdict:
    """Check that the configuration can be read and is valid."""
    if machine.run is None:
        return verdict.absent(_NONE, "asyncmoe doctor CONFIG also looks at its ports, run directory and model")
    if machine.run.trouble is not None:
        return verdict.error(machine.run.trouble, "correct what is named; examples/demo.yaml is a valid one")
    return verdict.ok(machine.run.config)


def ports(machine: Machine) -> Verdict:
    """Check that the configured ports are free."""
    run = _usable(machine)
    if isinstance(run, Verdict):
        return run
    if taken := [port for port in run.ports if port.trouble is not None]:
        told = ", ".join(f"{port.key} {port.number} on {port.host or 'any address'}: {port.trouble}" for port in taken)
        first = taken[0]
        return verdict.error(
            told, f"ss -ltnp 'sport = :{first.number}' says who has it; end that, or choose another {first.key} (0: any free one)"
        )
    low, high = machine.network.ephemeral
    told = ", ".join(f"{port.key} {port.number}" for port in run.ports)
    if handed_out := [port for port in run.ports if low <= port.number <= high]:
        return verdict.warning(
            f"{told}: free now, but the system gives {low} to {high} to any process that asks for a port",
            f"choose {handed_out[0].key} outside of that, or 0 for any free one",
        )
    return verdict.ok(f"{told} can be listened on" if told else "the configuration takes any free ones")


def run_dir(machine: Machine) -> Verdict:
    """Check that the run directory is writable, supports renames and locks, and has room for the checkpoints."""
    run = _usable(machine)
    if isinstance(run, Verdict):
        return run
    disk = run.disk
    if disk is None:
        return verdict.error(f"run.dir: {run.disk_trouble}", "look whether its file system is mounted and answers: df, mount")
    told = f"{disk.directory}: {disk.kind}{' (shared)' if disk.kind in _SHARED else ''}, {size(disk.free_bytes)} free"
    if disk.trouble is not None:
        return verdict.error(f"{told}; in {disk.probed}: {disk.trouble}", "choose another run.dir, or mend its rights, quota or mount")
    if short := _room(run, disk, told):
        return short
    if disk.free_files is not None and disk.free_files < _FREE_FILES:
        return verdict.warning(f"{told}, but only {disk.free_files} more files", "delete files there, or choose another run.dir")
    if run.several_machines and disk.kind not in _SHARED:
        return verdict.warning(f"{told}; other machines may not see it", "choose a run.dir on a file system that all machines mount")
    if disk.kind in _FLEETING:
        return verdict.warning(
            f"{told}; what is on {disk.kind} is gone with the machine or container", "choose a run.dir on a disk that stays"
        )
    return verdict.ok(told + (f"; a checkpoint takes about {size(run.checkpoint_bytes)}" if run.checkpoint_bytes else ""))


def model(machine: Machine) -> Verdict:
    """Check that the model is readable, complete, of a supported family, and divisible by the parallel sizes."""
    run = _usable(machine)
    if isinstance(run, Verdict):
        return run
    found = run.model
    if found is None and (machine.trainer.extension is None or machine.trainer.extension.trouble):
        return verdict.error("it cannot be looked at without asyncmoe's extension", "see the line extension")
    if found is None:
        return verdict.error(f"model.path: {run.model_trouble}", "look whether its file system is mounted and answers: df, mount")
    if found.trouble is not None:
        return verdict.error(found.trouble, "set model.path to a Hugging Face model directory, and change the key that is named")
    if found.to_make:
        return verdict.ok(f"{found.path} will be made by the run")
    return verdict.ok(f"{found.path}: {found.family}, {size(found.weights_bytes or 0)} of weights")


def own_code(machine: Machine) -> Verdict:
    """Check that the user's own parts of the objective and model family pass their trials, and that the other code can be found."""
    run = _usable(machine)
    if isinstance(run, Verdict):
        return run
    if run.own_trouble is not None:
        return verdict.error(run.own_trouble, "docs/guides/objective.md and docs/guides/model-family.md say what is expected of it")
    if run.rollout_trouble is not None:
        return verdict.error(run.rollout_trouble, "install what is missing, or start in the directory that contains the module")
    if not run.own and not run.rollout_code:
        return verdict.absent("the configuration names no functions, classes or model family of your own")
    tried, found = (", ".join(f"{key} {target}" for key, target in code.items()) for code in (run.own, run.rollout_code))
    return verdict.ok("; ".join(filter(None, (tried, found and f"not tried here, but by asyncmoe config validate: {found}"))))


def _usable(machine: Machine) -> RunFacts | Verdict:
    """Return the run, or the verdict in the absence of a valid one."""
    if machine.run is None:
        return verdict.absent(_NONE)
    if machine.run.trouble is not None:
        return verdict.absent("the configuration is not valid", "see the line configuration")
    return machine.run


def _room(run: RunFacts, disk: Disk, told: str) -> Verdict | None:
    """Return a verdict if the checkpoints that will exist at once, beyond the present ones, do not fit."""
    if run.checkpoint_bytes is None:
        return None
    to_come = max(1, run.keep_checkpoints + 1 - disk.checkpoints)
    hint = "free space, choose another run.dir, or keep fewer (trainer.keep_checkpoints)"
    if disk.free_bytes < run.checkpoint_bytes:
        return verdict.error(f"{told}; one checkpoint takes about {size(run.checkpoint_bytes)}", hint)
    if disk.free_bytes < to_come * run.checkpoint_bytes:
        return verdict.warning(f"{told}; {to_come} more checkpoints take about {size(to_come * run.checkpoint_bytes)}", hint)
    return None
