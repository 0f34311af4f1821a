"""GPU checks and memory arguments for engines started on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from asyncmoe import models
from asyncmoe.config import Config, devices
from asyncmoe.doctor.facts import GpuFacts
from asyncmoe.doctor.probes import nvidia
from asyncmoe.errors import ConfigError
from asyncmoe.plan import budget
from asyncmoe.rpc import address

_MIB = 1 << 20


def engine_arguments(config: Config, index: int | None = None) -> tuple[str, ...]:
    """Return the server arguments that bound the memory of an engine started on this machine; empty without GPUs.

    Args:
        index: index of the engine on this machine; None if all engines of the configuration start here.

    Raises:
        ConfigError: there is no GPU for the engine, or none with enough memory.
    """
    found = nvidia.look().visible
    if not found or not _on_gpus():
        return ()
    check(config, index, len(found))
    return budget.engine_arguments(config, models.load_hf_config(config.model.path), smallest(found))


def _on_gpus() -> bool:
    """True if this environment's torch is built for CUDA, so that its runs compute on GPUs."""
    import torch

    return torch.version.cuda is not None


def check(config: Config, index: int | None, gpus: int) -> None:
    """Check that the engines find GPUs.

    Args:
        index: as in `engine_arguments`.
        gpus: number of GPUs of this machine.

    Raises:
        ConfigError: this machine has too few GPUs, or the engines' GPUs overlap the trainer's.
    """
    several = address.several(config.cluster.network)
    if index is None:
        here = devices.wanted(config, several)[-1]
        devices.place(here, gpus)
        return
    tp, first = config.engines.tp, devices.first_gpu(config, several)
    if (end := first + (index + 1) * tp) > gpus:
        got = f"GPUs {end - tp} to {end - 1} for engine {index} of a machine with {devices.counted(gpus)}"
        raise ConfigError("engines.tp", got=got, expected=f"GPUs below {gpus}", cure="start fewer engines here, or give engines.first_gpu")


def smallest(found: Sequence[GpuFacts]) -> float:
    """Return the memory of the smallest GPU, in GB (1e9 bytes)."""
    return min(gpu.memory_mib for gpu in found) * _MIB / 1e9
