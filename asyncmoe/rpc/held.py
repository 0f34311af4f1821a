"""Fetches leased trajectories from whoever holds them: a store (queue.payloads), rollout workers, or the controller."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from asyncmoe.errors import AsyncmoeError, DataError, ProtocolError, StorageError, UserError
from asyncmoe.payloads.packed import Asked
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Fetch, Fetched
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trajectory import Buffer, frames_in

log = logging.getLogger(__name__)


def fetch(client: Client, request: Fetch, items: Sequence[Item], holders: Mapping[int, Rendezvous], timeout_s: float) -> list[Buffer]:
    """Return the frames of trajectories, in the order of `request.keys`; with `request.ahead` none, if some have left the queue.

    What a worker or a store does not send, because it is lost, silent or damaged, the controller reads from the journal, but for what is
    fetched ahead.

    Args:
        client: of the controller.
        items: what the controller said of `request.keys`, in their order.
        holders: where workers serve, by number.

    Raises:
        UserError: the store cannot be opened, or refuses the user.
        AsyncmoeError: the controller cannot send it either.
    """
    found = _stored(client, request, [item for item in items if item.stored])
    for number in sorted({item.holder for item in items} & holders.keys()):
        keys = tuple(item.key for item in items if item.holder == number and not item.stored)
        if not keys:
            continue
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


def _stored(client: Client, request: Fetch, items: Sequence[Item]) -> dict[str, Sequence[Buffer]]:
    """Return the frames of those trajectories that the store has whole, by key. Raises UserError."""
    if not items or client.store_rests:
        return {}
    asked = [Asked(item.stored, item.key, request.layers, request.masks) for item in items]
    try:
        found = client.store.get(asked)
    except UserError:
        raise  # the same is wrong at each fetch, and the controller can hardly do the work of a store for all ranks
    except StorageError as error:
        client.store_failed()
        log.warning("%s; the controller is asked instead, and for a minute at once", error)
        return {}
    except AsyncmoeError as error:
        log.warning("%s; the controller is asked instead", error)
        return {}
    wrong = [one for one in found if isinstance(one, DataError)]
    if wrong and not request.ahead:  # else it may have been dropped meanwhile
        log.warning("%s (%d of %d trajectories); the controller is asked instead", wrong[0], len(wrong), len(items))
    return {item.key: one for item, one in zip(items, found, strict=True) if not isinstance(one, DataError)}


def split(keys: Sequence[str], frames: Sequence[Buffer]) -> dict[str, Sequence[Buffer]]:
    """Return the frames of each trajectory. Raises ProtocolError if they are not as many as the trajectories have."""
    each = frames_in(1)
    if len(frames) != len(keys) * each:
        raise ProtocolError(f"got a batch of {len(frames)} frames, expected {len(keys) * each}")
    return {key: frames[n * each : (n + 1) * each] for n, key in enumerate(keys)}
