"""The directory of a run with records of its trained steps, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from asyncmoe.config import Config
from asyncmoe.config.log import LogSection
from asyncmoe.config.model import MadeModel
from asyncmoe.flight import records
from asyncmoe.flight.batches import Batches
from asyncmoe.log import belonging
from asyncmoe.models.make import make_model
from asyncmoe.rpc.messages import Leased
from asyncmoe.trajectory import Routing
from tests.configs import minimal
from tests.unit.kept_trajectory import distinct, masks_of, sampled
from tests.unit.log_lives import SIZE, Home, Life, live
from tests.unit.test_checkpoints import saved

FILES = Home()
_ROUTING = Routing(all_layers=3, layers=(0, 1, 2), top_k=2, experts=5)


@dataclass
class FlightRun:
    """A run whose log is in files.

    Attributes:
        trained: for each step's number in leases, the batch that was leased last, and its frames.
    """

    folder: Path
    life: Life
    trained: dict[int, tuple[Leased, bytes]] = field(default_factory=dict)

    async def step(self, number: int, skipped: str = "") -> None:
        """Lease a step, as it was leased before or with new groups, and commit it."""
        if number not in self.trained:
            for group in (2 * number, 2 * number + 1):
                self.life.begin(group)
                await self.life.put([recorded(group, episode, number) for episode in range(SIZE)])
        leased = await self.life.lease(number)
        self.trained[number] = leased, await self.life.fetched(leased)
        self.life.queue.commit(number, skipped)
        self.life.queue.set_version(number + 1)

    async def restart(self, to: Path, step: int) -> None:
        """Leave what a kill leaves in `to`, and resume there at a step."""
        self.folder = self.life.kill(to)
        self.life = await live(self.life.home, to, step)
        self.life.queue.set_version(step)

    def batches(self) -> Batches:
        """What is in the log now."""
        return Batches(self.folder, LogSection())


def recorded(group: int, episode: int, version: int) -> Any:
    """A trajectory with routes and masks."""
    from asyncmoe.trajectory import encode_masks, encode_routes

    draw, key = np.random.default_rng([group, episode]), f"g{group}.e{episode}"
    routes = encode_routes(distinct(draw, 3, 3, 2, 5), _ROUTING, key)
    masks = encode_masks(masks_of([[], [], [1, 4], [4]], 9), key)
    mask = np.array([0, 0, 1, 1], bool)
    return sampled([1, 2, 4, 4], mask, versions=version, group=group, episode=episode, key=key, routes=routes, masks=masks)


async def begun(folder: Path, home: Home = FILES) -> FlightRun:
    """A run that has not trained yet."""
    folder.mkdir()
    belonging.write(folder, belonging.Belonging(belonging.FORM, {"run.seed": "0"}, begun=True, run="run"))
    return FlightRun(folder, await live(home, folder))


def configured(folder: Path, checkpoints: Sequence[int], **sections: Any) -> Config:
    """Give a run its configuration, model and checkpoints."""
    make_model(folder / "model", MadeModel(), seed=0)
    config = minimal(folder, folder / "model", 99, **sections)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for step in checkpoints:
        saved(folder, step)
    return config


def write_records(folder: Path, config: Config, steps: Sequence[int], starts: Sequence[int] = (0,)) -> None:
    """Write records of steps as their users count them, with a start of the trainer before some of them."""
    with (folder / records.TRAINED).open("wb") as file:
        for step in steps:
            if step - 1 in starts:
                start = records.Started(step - 1, config.model_dump(mode="json"), {"torch": "2"}, ("a",), True)
                file.write(msgspec.json.encode(start) + b"\n")
            record = records.TrainedStep(step, "0" * 16, (), (False,), b"\1", 0.5, (0.25,), (1.0,), b"\2", b"\3", b"\4")
            file.write(msgspec.json.encode(record) + b"\n")
