"""The start of a trainer: its ranks meet, the model and its optimizer are built, and a checkpoint is loaded."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.platform import collectives, kernels
from asyncmoe.rpc import nccl_settings
from asyncmoe.trainer import objective
from asyncmoe.trainer.lora import canonical
from asyncmoe.trainer.model import checkpoint, gpt, mesh, optimizer
from asyncmoe.trainer.model.replay import Replay
from asyncmoe.trainer.objective import Plugins

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

log = logging.getLogger(__name__)


def join(config: Config) -> tuple[mesh.Mesh, Plugins]:
    """Join the other ranks, and load the objective's plug-ins. Collective over torchrun's ranks.

    Raises:
        UserError: the model does not fit the configuration, or a plug-in cannot be used.
    """
    place = mesh.start(config.trainer, config.run.seed)
    models.check(config, models.hf_config_of(config))
    plugins = objective.load(config.objective, config.trainer.cp)
    agree(plugins)
    if place.rank == 0:
        log.info("%d rank(s), %s; settings of NCCL, as engines have them: %s", place.world, kernels.detect(), nccl_settings.shared())
    return place, plugins


def load(config: Config, place: mesh.Mesh, newest: Path | None) -> tuple[gpt.Model, MegatronOptimizer, int]:
    """Build the model and its optimizer, and load a checkpoint; without one, the model's files. Collective over all ranks.

    Returns:
        The model, the optimizer, and the steps taken.

    Raises:
        ConfigError: Megatron cannot build the model.
        DataError: the checkpoint or the model's files cannot be loaded.
    """
    hf = models.hf_config_of(config)
    try:
        built = gpt.build(hf, config, place)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        traceback.print_exc()  # Megatron rejects arguments with these types; failing devices, disks and ranks raise other types
        raise ConfigError(f"the model {config.model.path}", got=repr(error), expected="a model that Megatron can build") from error
    if place.rank == 0:
        log.info("Megatron's switches: %s", built.switches.text)
    if newest is None or config.adapter is not None:  # adapter runs save no base weights
        gpt.load_hf(built, config.model.path)
    if newest is None and config.adapter is not None and config.adapter.start is not None:
        canonical.start_from(built, config.adapter.start, config.model.path)
    adam = optimizer.build(config, built)
    return built, adam, 0 if newest is None else checkpoint.load(newest, config, built, adam)


def replay(config: Config, built: gpt.Model) -> Replay | None:
    """Return the routing replay for this rank's routers; None if routing is not kept."""
    routing = models.kept_routing(config, built.hf)
    return None if routing is None else Replay(built.chunks, built.config, routing, (built.mesh.tp_rank, built.mesh.tp))


def agree(plugins: Plugins) -> None:
    """Refuse plug-ins whose source differs between ranks, which would train with different objectives. Collective over all ranks.

    Raises:
        ConfigError: names the plug-in and the ranks; the same on every rank.
    """
    everyone = collectives.everyones(plugins.sources)
    for target, digest in everyone[0].items():
        others = [rank for rank, found in enumerate(everyone) if found.get(target) != digest]
        if others:
            got = f"another file of {target} on rank {others[0]} than on rank 0"
            raise ConfigError("objective", got=got, expected="the same file everywhere", hint="copy the file, or set PYTHONPATH")
