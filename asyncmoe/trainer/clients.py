"""The connections of a trainer rank to the controller."""

from __future__ import annotations

from asyncmoe.config import Config
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.environment import trainer_epoch
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.returning import ReturningClient, Standings
from asyncmoe.telemetry import heartbeats


def clients(config: Config, rendezvous: Rendezvous, name: str) -> tuple[Client, Client]:
    """Return the rank's two connections to the controller: of its loop, and of its publisher of weights."""
    epoch, standings = trainer_epoch(), Standings()

    def waiting() -> None:
        heartbeats.beat("waiting for the next controller")

    def client(name: str, holds: bool) -> Client:
        if not config.survives_controller:
            return Client(rendezvous, name, epoch)
        return ReturningClient(rendezvous, name, epoch, config.run.dir, config.engines.orphan_s, standings, holds, waiting)

    return client(name, True), client(f"{name}.weights", False)
