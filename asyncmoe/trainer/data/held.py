"""Fetches leased trajectories from the rollout workers that hold them.

A replacement for a lost worker reads its predecessor's trajectories from the log, so a rank waits for it; the controller ends the run if
no replacement comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from asyncmoe.errors import ProtocolError, WaitTimeout
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import FindWorker, WorkerFound
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.telemetry import heartbeats
from asyncmoe.trajectory import Buffer, frames_in

log = logging.getLogger(__name__)
_PATIENCE_S, _AGAIN_S, _TRIES = 2.0, 1.0, 3
"""Seconds that one request waits for a worker's address; seconds between attempts; number of attempts at a worker that does not answer."""


def fetch(client: Client, items: Sequence[Item], layers: tuple[int, ...] | None, masks: bool) -> list[Buffer]:
    """Return the frames of trajectories, in the order of `items`.

    Args:
        client: connection to the controller.
        layers, masks: as in `WorkerFetch`.

    Raises:
        WaitTimeout: a worker does not answer.
        ProtocolError: a worker sends more or fewer frames than the trajectories have.
        DataError: the log no longer has a lost worker's trajectories.
    """
    found, each = dict[str, Sequence[Buffer]](), frames_in(1)
    places = {item.key: item.place for item in items if item.place is not None}  # a leased item has one
    for writer in sorted({place.writer for place in places.values()}):
        there = {key: place for key, place in places.items() if place.writer == writer}
        frames = _asked(client, writer, WorkerFetch(there, layers, masks))
        if len(frames) != len(there) * each:
            raise ProtocolError(f"got a batch of {len(frames)} frames, expected {len(there) * each}")
        found |= {key: frames[n * each : (n + 1) * each] for n, key in enumerate(there)}
    return [frame for item in items for frame in found[item.key]]


def _asked(client: Client, writer: int, request: WorkerFetch) -> list[Buffer]:
    name, failures = f"rollout worker {writer}", 0
    while True:
        reply = client.ask(FindWorker(writer, _PATIENCE_S), _PATIENCE_S + ANSWER_S)[0]
        assert isinstance(reply, WorkerFound)
        try:
            if reply.rendezvous is not None:
                return client.beside(reply.rendezvous, name).ask(request, ANSWER_S)[1]
            heartbeats.beat(f"waiting for {name}")
        except WaitTimeout as error:
            failures += 1
            if failures == _TRIES:
                raise
            log.warning("%s; asking again", error)
            time.sleep(_AGAIN_S)
