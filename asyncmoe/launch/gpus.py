"""GPU checks and memory arguments for engines started on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from asyncmoe import models
from asyncmoe.config import Config, devices
from asyncmoe.doctor import cards, nvidia, pythons
from asyncmoe.doctor.facts import GpuFacts, Nvidia
from asyncmoe.errors import ConfigError
from asyncmoe.plan import budget
from asyncmoe.rpc import address


def engine_arguments(config: Config, index: int, *, alone: bool = False) -> tuple[str, ...]:
    """Return the server arguments that bound the memory of an engine started on this machine; empty without GPUs.

    Args:
        index: index of the engine on this machine.
        alone: this machine has engines only, and no trainer ranks.

    Raises:
        ConfigError: this machine has no GPU for the engine, or its memory is unknown or too small.
    """
    found = nvidia.look()
    if not found.gpus or found.chosen == () or not _on_gpus():
        return ()
    visible = _cards(found)
    if not visible and not found.visible:
        return ()
    taken = check(config, index, len(visible), cards.hidden(found, len(visible)), alone=alone)
    if known := [visible[number].memory_mib for number in taken if visible[number].memory_mib]:
        return budget.engine_arguments(config, models.hf_config_of(config), (min(known) << 20) / 1e9)
    if budget.is_bounded(config):
        return ()
    got, expected = "unknown: neither nvidia-smi nor torch reports it", "its size, which bounds the engine's memory"
    hint = "give engines.max_total_tokens, and --mem-fraction-static in engines.args"
    raise ConfigError("memory of an engine's GPU", got=got, expected=expected, hint=hint)


def here() -> tuple[int, float]:
    """Return the number of GPUs that a run on this machine sees, and the memory of the smallest in GB; 0, 0 without GPUs."""
    visible = () if devices.none_here() else _cards(nvidia.look())
    return len(visible), min(((card.memory_mib << 20) / 1e9 for card in visible), default=0.0)


def _cards(found: Nvidia) -> tuple[GpuFacts, ...]:
    """The GPUs that CUDA shows. A separate process asks torch if nvidia-smi does not know their memory, or if the GPUs differ: CUDA then
    orders them differently."""
    listed = cards.cards(found, None)
    if listed and all(card.memory_mib for card in listed) and len(cards.kinds(listed)) == 1:
        return listed
    return cards.cards(found, pythons.look(sys.executable, ["torch"]).torch)


def _on_gpus() -> bool:
    """True if this environment's torch is built for CUDA, so that its runs compute on GPUs."""
    import torch

    return torch.version.cuda is not None


def check(config: Config, index: int, gpus: int, hidden: int = 0, *, alone: bool = False) -> Sequence[int]:
    """The GPUs of an engine.

    Args:
        hidden: number of GPUs that CUDA_VISIBLE_DEVICES hides from the run.
        alone: as for `engine_arguments`.

    Raises:
        ConfigError: this machine has too few GPUs, or the engines' GPUs overlap the trainer's.
    """
    several = address.several(config.cluster.network)
    *_, here = devices.wanted(config, several)
    if several or alone or index >= config.engines.count:  # this machine has engines 0 to `index`, and no trainer ranks
        here = replace(here, ranks=0, engines=index + 1)
    return devices.place(here, gpus, hidden).engines[index]
