"""The connections of a trainer rank to the controller."""

from __future__ import annotations

from asyncmoe.rpc.client import Client
from asyncmoe.rpc.environment import trainer_epoch
from asyncmoe.rpc.rendezvous import Rendezvous


def clients(rendezvous: Rendezvous, name: str, *threads: str) -> tuple[Client, ...]:
    """Return the rank's connections to the controller: of its loop, of its publisher of weights, and of each of `threads`."""
    names = (name, *(f"{name}.{thread}" for thread in ("weights", *threads)))
    return tuple(Client(rendezvous, one, trainer_epoch()) for one in names)
