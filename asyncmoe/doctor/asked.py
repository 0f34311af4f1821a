"""Checks of what a configuration asks for by name, by the functions that decide it when the run starts."""

from __future__ import annotations

from asyncmoe.config.training import MegatronSection
from asyncmoe.config.transports import transport_for
from asyncmoe.doctor import cards, verdict
from asyncmoe.doctor.facts import Machine, OnGpus
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.errors import ConfigError
from asyncmoe.platform.kernels import Kernels, release
from asyncmoe.trainer.model import switches


def transport(machine: Machine) -> Verdict:
    """`sync.transport` goes between GPUs, and as far as the run's machines are apart."""
    asked = on_gpus(machine)
    if isinstance(asked, Verdict):
        return asked
    if asked.transport is None:
        return verdict.ok("weights are broadcast over NCCL")
    several = machine.run is not None and machine.run.several_machines
    shared = any(wanted.share for wanted in asked.places)
    try:
        return verdict.ok(f"weights travel over {transport_for(asked.transport, gpu=True, together=not several, shared=shared)}")
    except ConfigError as error:
        return verdict.refused(error, "leave it out: auto chooses what goes there")


def megatron_switches(machine: Machine) -> Verdict:
    """`trainer.megatron` asks for nothing that this machine lacks."""
    asked = on_gpus(machine)
    if isinstance(asked, Verdict):
        return asked
    if asked.features is None:
        return verdict.ok("none is set")
    try:
        on = switches.decide(MegatronSection.model_validate(dict(asked.megatron)), kernels(machine), asked.features)
    except ConfigError as error:
        return verdict.refused(error)
    return verdict.ok(f"{len(on.off)} are off here, which the trainer's log explains" if on.off else "all are on")


def kernels(machine: Machine) -> Kernels:
    """The optional kernels as `asyncmoe.platform.kernels.detect` would find them in the trainer's process."""
    trainer, first = machine.trainer, next(iter(cards.of(machine)), None)
    major, _, minor = (first.capability if first is not None and first.capability else "0.0").partition(".")
    return Kernels(
        cuda=True,
        capability=(int(major), int(minor)),
        transformer_engine=release(trainer.packages.get("transformer-engine", "")) if "transformer-engine" in trainer.packages else (),
        apex=trainer.apex is not None and trainer.apex.nvidia,
        deep_ep=trainer.deep_ep,
    )


def on_gpus(machine: Machine) -> OnGpus | Verdict:
    """What the configuration asks of the GPUs, or what to say where it asks nothing."""
    if not machine.nvidia.present:
        return verdict.absent("there is no GPU; runs on the CPU work without")
    if machine.run is None or machine.run.trouble is not None:
        return verdict.absent("no valid configuration was given")
    if machine.run.on_gpus is None:
        return verdict.absent("the configuration does not suit its model", "see the line model")
    if cards.seen(machine) == 0:
        return verdict.absent("torch sees no GPU", "see the line cuda")
    return machine.run.on_gpus
