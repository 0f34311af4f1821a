"""Check a machine with GPUs for faults that would stop a run, before any of its processes starts."""

from __future__ import annotations

from asyncmoe.config import Config, devices
from asyncmoe.doctor import cards
from asyncmoe.doctor.examination import CHECKS
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.gather import gather
from asyncmoe.errors import UserError
from asyncmoe.installed import fix


def check(config: Config) -> tuple[str, ...]:
    """Run the doctor's checks if this machine has a usable NVIDIA device.

    Returns:
        Warnings, one line each, about causes of a slower run or a run on the CPU.

    Raises:
        UserError: a fault that would stop the run.
    """
    if devices.none_here():
        return ()
    return judge(gather(config))


def judge(machine: Machine) -> tuple[str, ...]:
    """Apply the checks to the facts of a machine; returns and raises like `check`."""
    torches = [machine.trainer.torch, machine.engine_python.torch]
    if all(torch is not None and torch.cuda is None for torch in torches):
        what = "torch of trainer and engines is built for the CPU, so the run uses only the CPU"
        return (f"{machine.host} has GPUs, but {what}; {fix(gpu=True)} installs one for GPUs",)
    found = {name: check(machine) for name, check in CHECKS.items()}
    for name, finding in found.items():
        if finding.state == "error":
            expected = finding.expected or "what a run on GPUs needs"
            raise UserError(f"{name} of {machine.host}", got=finding.found, expected=expected, hint=finding.hint)
    if not cards.of(machine):
        why = machine.nvidia.trouble or "CUDA shows none"
        hint = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, start it with GPUs (--gpus all, --nv)"
        raise UserError(f"GPUs of {machine.host}", got=f"none, though its driver is loaded ({why})", expected="at least one", hint=hint)
    return tuple(f"{name}: {finding.line}; {finding.hint}" for name, finding in found.items() if finding.state == "warning")
