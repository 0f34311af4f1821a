"""This machine's GPUs, as what starts engines here needs to know them."""

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
    """What bounds the memory of an engine that is started on this machine, as arguments of its server; none without GPUs.

    Args:
        index: of the engine among those of this machine; None: all of the configuration's are started here.

    Raises:
        ConfigError: there is no GPU for it, or none with room for it.
    """
    found = nvidia.look().visible
    if not found or not _on_gpus():
        return ()
    check(config, index, len(found))
    return budget.engine_arguments(config, models.load_hf_config(config.model.path), smallest(found))


def _on_gpus() -> bool:
    """Runs of this environment compute on GPUs: its torch is built for them."""
    import torch

    return torch.version.cuda is not None


def check(config: Config, index: int | None, gpus: int) -> None:
    """Refuse engines without GPUs.

    Raises:
        ConfigError: this machine has too few, or those of the trainer are among them.
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
    """GB (1e9 bytes) of the one with the least memory."""
    return min(gpu.memory_mib for gpu in found) * _MIB / 1e9
