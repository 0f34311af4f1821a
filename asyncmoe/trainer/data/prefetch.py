"""Fetches a rank's trajectories of the next step in a thread, while the step under way is computed.

The controller says which batch the next step will get as soon as nothing that runs can change it (`BoundedQueue.foresee`). Nothing is
decided by that: the batch is leased when its step begins, under the version that the trainer has then, and a trajectory that was fetched
ahead is used only if the lease has it, unchanged. What is missing is fetched then. So a run trains on the same batches with and without
this, and a stop, a checkpoint or a lost process meets no lease that it would not have met.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from asyncmoe.config import Config
from asyncmoe.errors import DataError, WaitTimeout
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Foresee, Foreseen
from asyncmoe.telemetry import heartbeats
from asyncmoe.trainer.data import held
from asyncmoe.trainer.data.held import split
from asyncmoe.trainer.data.joined import Joined, joined
from asyncmoe.trajectory import Buffer, Trajectory, decode

log = logging.getLogger(__name__)
_PATIENCE_S = 2.0
"""Longest wait of one request; the thread looks between two whether it is still wanted."""


def possible(config: Config) -> bool:
    """Whether the batch of an RL step can ever be complete while the step before it is computed.

    It cannot if its responses must come from the version that this step makes, nor if the queue has no room for two batches.
    """
    return config.queue.staleness.max_staleness > 0 and config.queue_capacity >= 2 * config.rollout.batch


def due(config: Config, step: int) -> bool:
    """Whether to fetch the batch of `step` ahead: an RL step that follows another."""
    return possible(config) and config.warmup.steps < step < config.warmup.steps + config.run.steps


@dataclass(frozen=True)
class FetchedAhead:
    """A trajectory that was fetched ahead. `decoded`: None if the ranks of a group are to decode it; then its frames are among `joined`."""

    item: Item
    frames: Sequence[Buffer]
    decoded: Trajectory | None = None
    joined: Joined | None = None


def completed(
    items: Sequence[Item], ready: Mapping[str, FetchedAhead], send: Callable[[tuple[str, ...]], Sequence[Buffer]]
) -> Sequence[Buffer] | Joined:
    """Return the frames of some trajectories, in order: of those that are ready, and of the others what `send` returns for their keys.
    If they are what was joined, and in that order, they are returned so.

    Raises:
        ProtocolError: `send` returned another number of frames.
    """
    missing = tuple(item.key for item in items if item.key not in ready)
    frames = send(missing) if missing else ()
    if not ready:
        return frames
    sent = split(missing, frames)
    found = [frame for item in items for frame in (ready[item.key].frames if item.key in ready else sent[item.key])]
    one = next(iter(ready.values())).joined
    whole = one is not None and len(found) == len(one.buffers) and all(a is b for a, b in zip(found, one.buffers, strict=True))
    return one if one is not None and whole else found


@dataclass
class _Coming:
    """What the thread is about, for one step. Either it begins to fetch, or it is no longer wanted, whichever is said first."""

    step: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _fetching: bool = False
    _over: bool = False

    @property
    def over(self) -> bool:
        return self._over

    def begin_fetch(self) -> bool:
        """Return whether the fetch is still wanted; then `end` says that it has begun."""
        with self._lock:
            self._fetching = not self._over
            return self._fetching

    def end(self) -> bool:
        """Say that nothing more is to begin. Return whether the fetch has begun."""
        with self._lock:
            self._over = True
            return self._fetching


class Prefetcher:
    """Fetches ahead for one rank. Methods are called by one thread, the rank's main one; its own thread touches no device.

    It holds one batch's share of the rank, besides the one in training.

    Args:
        client: used only here.
        choose: from a batch to the positions of it that the rank trains on.
        layers, masks: as for `asyncmoe.trainer.data.batch_client.fetch`.
        decodes: whether the thread decodes what it fetches.
    """

    def __init__(
        self,
        client: Client,
        config: Config,
        choose: Callable[[Sequence[Item]], Sequence[int]],
        layers: tuple[int, ...] | None,
        *,
        masks: bool,
        decodes: bool,
    ) -> None:
        self._client, self._config, self._choose = client, config, choose
        self._layers, self._masks, self._decodes = layers, masks, decodes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="next batch")
        self._under_way: tuple[_Coming, Future[Mapping[str, FetchedAhead]]] | None = None
        self._last: Future[Mapping[str, FetchedAhead]] | None = None
        self._closed = False

    def begin(self, step: int) -> None:
        """Begin with the batch of `step`, if it is one to be fetched ahead."""
        if due(self._config, step):
            self._drop()
            coming = _Coming(step)
            self._last = self._thread.submit(self._fetched, coming)
            self._under_way = coming, self._last

    def take(self, step: int, items: Sequence[Item]) -> Mapping[str, FetchedAhead]:
        """Return, by key, those of some leased trajectories that were fetched ahead; wait for a fetch that has begun.

        Raises:
            AsyncmoeError: what the thread failed with.
        """
        if self._under_way is None or self._under_way[0].step != step:
            return {}
        (coming, found), self._under_way = self._under_way, None
        if not coming.end() and not found.done():
            return {}  # it was not known in time; the thread finds out that it is over
        while not wait([found], timeout=_PATIENCE_S).done:
            heartbeats.beat(f"waiting for the trajectories of step {step + 1}")
        ready = found.result()
        return {item.key: ready[item.key] for item in items if item.key in ready and ready[item.key].item == item}

    def close(self) -> None:
        """End the thread and close the connection; leave both to the end of the process if the controller does not answer."""
        self._drop()
        self._thread.shutdown(wait=False)
        if self._last is not None and wait([self._last], timeout=2 * _PATIENCE_S).not_done:
            log.warning("the thread that fetches ahead did not end within %.0f s", 2 * _PATIENCE_S)
        elif not self._closed:
            self._closed = True
            self._client.close()

    def _drop(self) -> None:
        if self._under_way is not None:
            self._under_way[0].end()
            self._under_way = None

    def _fetched(self, coming: _Coming) -> Mapping[str, FetchedAhead]:
        found = self._foreseen(coming)
        wanted = [found.items[i] for i in self._choose(found.items)] if found.items else []
        if not wanted or not coming.begin_fetch():
            return {}
        keys = tuple(item.key for item in wanted)
        try:
            frames = held.fetch(self._client, wanted, self._layers, self._masks, patient=False)
        except (WaitTimeout, DataError) as error:  # its worker is lost, or it has left the queue: the lease will say
            log.warning("nothing is fetched ahead of step %d: %s", coming.step + 1, error)
            return {}
        parts = split(keys, frames)
        if self._decodes:
            return {item.key: FetchedAhead(item, parts[item.key], decode(parts[item.key])) for item in wanted}
        one = joined(frames)
        parts = split(keys, one.buffers)
        return {item.key: FetchedAhead(item, parts[item.key], joined=one) for item in wanted}

    def _foreseen(self, coming: _Coming) -> Foreseen:
        count, step = self._config.rollout.batch, coming.step
        while not coming.over:
            reply = self._client.ask(Foresee(step, count, version=step, wait_s=_PATIENCE_S), _PATIENCE_S + ANSWER_S)[0]
            assert isinstance(reply, Foreseen)
            if reply.items or reply.never:
                return reply
        return Foreseen()
