"""The trainer's end of devices in turn (`asyncmoe.occupancy`): releases memory that the next state does not allow, and waits for it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asyncmoe.config import Config
from asyncmoe.occupancy import HOLDS, TRAINER, DeviceTurn, Event
from asyncmoe.platform import collectives
from asyncmoe.reshard import device_threads
from asyncmoe.rpc import keys
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.environment import trainer_epoch
from asyncmoe.rpc.messages import TurnAwaited, TurnTaken
from asyncmoe.telemetry import heartbeats

if TYPE_CHECKING:
    from asyncmoe.trainer.model.mesh import Mesh
    from asyncmoe.trainer.model.sleep import Sleeper

_LOOK_S = 1.0
"""Seconds between two signs of life while a turn is awaited."""


class TrainerTurns:
    """Waits for the trainer's turns. Every rank makes the same calls.

    Attributes:
        sleeper: this rank's memory; None until the model is built.
    """

    def __init__(self, config: Config, place: Mesh) -> None:
        self.sleeper: Sleeper | None = None
        self._seconds = defaultdict[str, float](float)
        self._turn, self._first = DeviceTurn.GENERATING, place.rank == 0
        self._asking = device_threads.pool("cpu", 1, "turns")
        self._limit_s = config.engines.start_timeout_s + 3 * config.sync.timeout_s + ANSWER_S
        self._client = Client(
            keys.read(config.run.dir, wait_s=config.engines.start_timeout_s), f"trainer.{place.rank}.turns", trainer_epoch()
        )

    def wait_for(self, turn: DeviceTurn, event: Event | None = None) -> None:
        """Wait until this state is reached, holding only what it allows too. Collective over all ranks. From WAKING, TRAINING is reached
        without a publication.

        Raises:
            AsyncmoeError: the controller's failure; only rank 0 raises it, and its exit ends the other ranks.
        """
        if turn is self._turn and event is None:
            return
        if (self._turn, turn) == (DeviceTurn.WAKING, DeviceTurn.TRAINING):
            event = Event.YIELDED
        if event is Event.YIELDED:
            self._turn = DeviceTurn.ASLEEP
        with self.part("trainer_out"):
            if self.sleeper is not None:
                self.sleeper.hold(HOLDS[self._turn] & HOLDS[turn] & TRAINER)
            collectives.barrier()
        asked = self._asking.submit(self._client.ask, TurnAwaited(turn, event), self._limit_s) if self._first else None
        while not all(collectives.everyones(_answered(asked))):
            heartbeats.beat(f"waiting for its turn: {turn.value}")
        if asked is not None:
            taken = asked.result()[0]
            assert isinstance(taken, TurnTaken)
            for name, seconds in taken.seconds.items():
                self._seconds[name] += seconds
        with self.part("trainer_in"):
            if self.sleeper is not None:
                self.sleeper.hold(HOLDS[turn] & TRAINER)
        self._turn = turn

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done within as a part of a switch (`asyncmoe.telemetry.schema.Step.switch_seconds`)."""
        begin = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part since the last call. Rank 0's have the engines' too."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _answered(asked: Future[Any] | None) -> bool:
    """Wait a little for an answer; return whether it is there. Raises the controller's failure."""
    if asked is None or not wait([asked], _LOOK_S).done:
        return asked is None
    asked.result()
    return True
