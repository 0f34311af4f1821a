"""A run, as described by its configuration and by its model's config.json, and its demands on the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.config import Config, devices
from asyncmoe.config.transports import TRANSPORTS, resolved, transport_for
from asyncmoe.errors import UserError
from asyncmoe.rpc import address


@dataclass(frozen=True)
class PlannedRun:
    """A valid configuration, and the config.json of its model, checked against each other."""

    config: Config
    hf: Mapping[str, Any]

    @property
    def several(self) -> bool:
        """True if the run's processes communicate over a network."""
        return address.several(self.config.cluster.network)

    @property
    def wanted(self) -> tuple[devices.Wanted, ...]:
        """GPUs wanted on the machine; with several machines, on a trainer node and on an engine node."""
        return devices.wanted(self.config, self.several)

    @property
    def over_nccl(self) -> bool:
        """True if ranks of trainer and engines share an NCCL communicator."""
        sync, shared = self.config.sync, self.config.in_turn
        if sync.method != "reshard":
            return sync.method == "broadcast"
        return TRANSPORTS[resolved(sync.transport, True, not self.several, shared)].nccl

    def way(self) -> str:
        """Return what carries weights between GPUs: a method or a transport. Raises ConfigError if `sync.transport` cannot serve there."""
        sync, shared = self.config.sync, self.config.in_turn
        return transport_for(sync.transport, True, not self.several, shared) if sync.method == "reshard" else sync.method

    @property
    def trainer_float32(self) -> bool:
        return self.config.trainer.weights_dtype == "float32"

    @property
    def engine_dtype(self) -> str:
        from asyncmoe import models  # needs asyncmoe's extension, without which the doctor must still run

        return models.engine_dtype(self.hf, self.config.engines)


def planned(config: Config | None) -> PlannedRun | None:
    """Return the run of a configuration; None without one, or if its model cannot be used, which `asyncmoe config validate` reports."""
    if config is None:
        return None
    try:
        from asyncmoe import models
        from asyncmoe.plan import budget

        hf = budget.hf_of(config)
        models.check(config, hf)
        budget.least(config, hf)
    except (UserError, ImportError):
        return None
    return PlannedRun(config, hf)
