"""Checks of a machine with GPUs for faults that would stop a run, made before any process of the run starts."""

from __future__ import annotations

from asyncmoe.config import Config, devices
from asyncmoe.doctor.cards import seen
from asyncmoe.doctor.examination import CHECKS
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.probes.gathering import gather_for
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.errors import UserError
from asyncmoe.installed import fix

STOPS = (
    *("torch", "megatron-core", "packages", "extension", "engine-python", "sglang", "driver", "cuda", "transformer-engine", "gpus"),
    *("transport", "megatron-switches", "placement", "gpu-memory", "nccl"),
)
"""The doctor's checks whose errors stop a run on GPUs, ordered so that a root cause precedes its consequences."""


def check(config: Config) -> tuple[str, ...]:
    """Run the doctor's checks if this machine has a usable NVIDIA device.

    Returns:
        Warnings, one line each, about causes of a slower run or a run on the CPU.

    Raises:
        UserError: a fault that would stop the run.
    """
    if devices.none_here():
        return ()
    return judge(gather_for(config))


def judge(machine: Machine) -> tuple[str, ...]:
    """Apply the checks to the facts of a machine; returns and raises like `check`."""
    torches = [machine.trainer.torch, machine.engine_python.torch]
    if all(torch is not None and torch.cuda is None for torch in torches):
        what = "torch of trainer and engines is a build for the CPU, and so is the run"
        return (f"{machine.host} has GPUs, but {what}; {fix(gpu=True)} installs one for GPUs",)
    found = {name: CHECKS[name](machine) for name in STOPS}
    for name, verdict in found.items():
        if verdict.state == "error":
            expected = verdict.expected or "what a run on GPUs needs"
            raise UserError(f"{name} of {machine.host}", got=verdict.found, expected=expected, hint=verdict.hint)
    if seen(machine) == 0:
        why = machine.nvidia.trouble or "CUDA shows none"
        hint = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, start it with GPUs (--gpus all, --nv)"
        raise UserError(f"GPUs of {machine.host}", got=f"none, though its driver is loaded ({why})", expected="at least one", hint=hint)
    return tuple(_line(name, verdict) for name, verdict in found.items() if verdict.state == "warning")


def _line(name: str, verdict: Verdict) -> str:
    return f"{name}: {verdict.line}; {verdict.hint}" if verdict.hint else f"{name}: {verdict.line}"
