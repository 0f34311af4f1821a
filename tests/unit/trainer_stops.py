"""Stops the trainer's loop at the end of a warm-up, with publishers that wait for engines in vain; prints as JSON what it did, in order.

A program of its own, because the loop imports Megatron: python -m tests.unit.trainer_stops
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from asyncmoe.config import Config
from asyncmoe.errors import RunStopping, WeightSyncError
from asyncmoe.rpc.messages import Evaluated, Evaluations, Hello, Lease, Leased, Welcome
from asyncmoe.trainer import loop
from asyncmoe.trainer.learned import Learned
from tests.configs import demo

CONFIG = demo("warmup.steps=2", "run.steps=3", "evaluation.every=2")
RECORDED = demo("warmup.steps=2", "run.steps=3", "evaluation.every=0", "log.keep=2")


class Client:
    """The controller: grants every lease until a version is being published; then it answers with a stop, if the run is to stop."""

    def __init__(self, did: list[str], stops: bool, known: bool) -> None:
        self._did, self._stops, self._known = did, stops, known

    def ask(self, request: Any, timeout_s: float) -> tuple[Any, list[Any]]:
        if isinstance(request, Evaluations):
            self._did.append(f"Evaluations {request.version}")
            return Evaluated(self._known, self._did.count("Evaluations 5") > 2), []
        if not isinstance(request, Lease):
            self._did.append(type(request).__name__)
            return Welcome() if isinstance(request, Hello) else None, []
        stop = self._stops and "begin" in self._did
        return Leased(request.step, () if stop else (1,), 0, {}, stop), []  # type: ignore[arg-type]


class Publisher:
    """Publishes in the background, where it is refused: the next call says so."""

    def __init__(self, did: list[str]) -> None:
        self._did = did

    def begin(self, version: int) -> None:
        self._did.append("begin")

    def check(self) -> None:
        if "begin" in self._did:
            raise WeightSyncError("the run is being stopped, and its engines have not started")

    settle = check

    def close(self) -> None:
        self._did.append("close")


class Saver:
    """Saves at once."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, float]] = []

    def save(self, step: int) -> None:
        self._steps.append((step, 0.0))

    def saved(self) -> list[tuple[int, float]]:
        found, self._steps = self._steps, []
        return found

    def settle(self) -> None:
        pass


class Willing(Publisher):
    """Publishes."""

    def check(self) -> None:
        pass

    settle = check


class AtOnce(Willing):
    """Is refused while it publishes."""

    def begin(self, version: int) -> None:
        super().begin(version)
        raise RunStopping("the run is being stopped, and its engines have not started")


def run(kind: type[Publisher], stops: bool, done: int = 0, known: bool = False, config: Config = CONFIG) -> list[str]:
    """Run the loop from step `done`; return what it did, with the error that ended it."""
    did: list[str] = []
    trainer: Any = loop.Trainer.__new__(loop.Trainer)
    trainer._config, trainer._client, trainer._sync = config, Client(did, stops, known), kind(did)
    trainer._mesh = SimpleNamespace(rank=0, world=1)
    trainer._learner = SimpleNamespace(learn=lambda *_: Learned([]), scored=None, close=lambda: None)
    trainer._recorder = SimpleNamespace(same=False, record=lambda *_: None)
    trainer._profiler = SimpleNamespace(step=lambda _: nullcontext())
    trainer._record = lambda *_: did.append("record")
    trainer._step = trainer._saved = done
    trainer._served, trainer._behind, trainer._saver = 0, True, Saver()
    trainer._total, trainer._first, trainer._waits = 5, True, []
    trainer._turns = trainer._published = trainer._left = None
    trainer._metrics = trainer._spans = trainer._model = trainer._optimizer = trainer._expected = None
    try:
        trainer.run()
    except WeightSyncError:
        did.append("failed")
    return did


if __name__ == "__main__":
    whole: Any = loop
    whole.gpt.gather_weights = whole.facts = lambda _: None
    whole.loaded_weights.compare = lambda *_: None
    found = {kind.__name__: run(kind, True) for kind in (Publisher, AtOnce)}
    whole.collectives.everyones = lambda mine: [mine]
    last = {kind.__name__: run(kind, False, done=5) for kind in (Willing, AtOnce)} | {"known": run(Willing, False, done=5, known=True)}
    found["recorded"] = run(Willing, False, done=2, config=RECORDED)
    print(json.dumps(found | {"resumed": run(AtOnce, True, done=2), "failing": run(Publisher, False), "last": last}))
