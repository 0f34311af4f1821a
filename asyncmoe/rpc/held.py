"""Fetches leased trajectories from whoever holds them: the rollout workers that sampled them, or the controller."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from asyncmoe.errors import AsyncmoeError, ProtocolError
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Fetch, Fetched
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trajectory import Buffer, frames_in

log = logging.getLogger(__name__)


def fetch(client: Client, request: Fetch, items: Sequence[Item], holders: Mapping[int, Rendezvous], timeout_s: float) -> list[Buffer]:
    """Return the frames of trajectories, in the order of `request.keys`; with `request.ahead` none, if some have left the queue.

    What a worker does not send, because it is lost or silent, the controller reads from the log, but for what is fetched ahead.

    Args:
        client: of the controller.
        items: what the controller said of `request.keys`, in their order.
        holders: where workers serve, by number.

    Raises:
        AsyncmoeError: the controller cannot send it either.
    """
    found = dict[str, Sequence[Buffer]]()
    for number in sorted({item.holder for item in items} & holders.keys()):
        keys = tuple(item.key for item in items if item.holder == number)
        try:
            worker = client.beside(holders[number], f"rollout worker {number}")
            found |= split(keys, worker.ask(WorkerFetch(keys, request.layers, request.masks), timeout_s)[1])
        except AsyncmoeError as error:
            log.warning("%s; the controller is asked instead", error)
    missing = tuple(key for key in request.keys if key not in found)
    if missing:
        reply, frames = client.ask(msgspec.structs.replace(request, keys=missing), timeout_s)
        assert isinstance(reply, Fetched)
        if request.ahead and not reply.keys:
            return []
        found |= split(missing, frames)
    return [frame for key in request.keys for frame in found[key]]


def split(keys: Sequence[str], frames: Sequence[Buffer]) -> dict[str, Sequence[Buffer]]:
    """Return the frames of each trajectory. Raises ProtocolError if they are not as many as the trajectories have."""
    each = frames_in(1)
    if len(frames) != len(keys) * each:
        raise ProtocolError(f"got a batch of {len(frames)} frames, expected {len(keys) * each}")
    return {key: frames[n * each : (n + 1) * each] for n, key in enumerate(keys)}
