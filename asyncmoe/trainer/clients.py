"""The connections of a trainer rank to the controller."""

from __future__ import annotations

from collections.abc import Callable

from asyncmoe.config import Config
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.environment import trainer_epoch
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.returning import ReturningClient, Standings
from asyncmoe.telemetry import heartbeats

ANSWER_S = 60.0
"""Timeout of controller replies that require no waiting."""


def clients(config: Config, rendezvous: Rendezvous, name: str, *threads: str) -> tuple[Client, ...]:
    """Return the rank's connections to the controller: of its loop, of its publisher of weights, and of each of `threads`."""
    epoch, standings = trainer_epoch(), Standings()

    def waiting() -> None:
        heartbeats.beat("waiting for the next controller")

    def client(name: str, holds: bool, waiting: Callable[[], None] = waiting) -> Client:
        if not config.survives_controller:
            return Client(rendezvous, name, epoch)
        return ReturningClient(rendezvous, name, epoch, config.run.dir, config.engines.orphan_s, standings, holds, waiting)

    # A heartbeat says that the loop gets on, so threads beside it give none.
    others = (client(f"{name}.{thread}", False, lambda: None) for thread in threads)
    return client(name, True), client(f"{name}.weights", False), *others
