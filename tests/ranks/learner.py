"""One rank of a job that runs a learner: `learner.py RESULT PATH LAYOUT`, where PATH has a model in `hf`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, WaitTimeout
from asyncmoe.log.log import Place
from asyncmoe.queue.group_buffer import describe
from asyncmoe.rpc.messages import Fetched, FindWorker, Leased, WorkerFound
from asyncmoe.trainer import start
from asyncmoe.trainer.batch_trainer import Learner
from asyncmoe.trainer.data import held, shared_fetch
from asyncmoe.trainer.model import mesh, optimizer
from asyncmoe.trainer.objective import NO_PLUGINS
from asyncmoe.trainer.samples import TrainerSamples
from asyncmoe.trajectory import Trajectory, encode
from tests.configs import minimal
from tests.ranks import case, group
from tests.ranks.parity import Job, snapshot
from tests.unit.kept_trajectory import trajectory

VERSION = 3


class Controller:
    """A client that answers its own requests, also for the worker with the batch, unless that is lost."""

    def __init__(self) -> None:
        self.batch: dict[str, Trajectory] = {}
        self.asked, self.gone = 0, False

    def beside(self, *_: object) -> Controller:
        return self

    def ask(self, request: Any, timeout_s: float) -> Any:
        if isinstance(request, FindWorker):
            here: Any = "here"
            return WorkerFound(here), []
        self.asked += 1
        if self.gone:
            raise WaitTimeout("rollout worker 1", "an answer", timeout_s)
        return Fetched(), [frame for key in request.places for frame in encode(self.batch[key])]

    def lease(self, routing: Any, logprob: float, replayed: bool = False) -> Leased:
        """A batch of two groups of two, of the trainer's version, whose tokens the engine gave this log-probability."""
        made = [trajectory(5 + 3 * seed, seed, routing)[0] for seed in range(4)]
        for seed, one in enumerate(made):
            logprobs = np.where(one.loss_mask, logprob, 0).astype(np.float32)
            changed = {"group": seed // 2, "episode": seed % 2, "reward": float(seed % 2), "prefix_version": VERSION}
            self.batch[one.key] = replace(one, logprobs=logprobs, **changed)  # type: ignore[arg-type]
        items = tuple(msgspec.structs.replace(describe(one), place=Place(1, 0)) for one in self.batch.values())
        return Leased(VERSION, items, 0, {}, replayed=replayed)


def main(folder: str, layout: str) -> list[Any]:
    controller: Any = Controller()
    path = Path(folder)
    shared_fetch.PART_BYTES = 100  # many parts
    held._AGAIN_S, held._TRIES = 0.0, 1
    config = configuration(path, layout, {"anomalies": {"skips": 1}})
    built = Job(path, config, mesh.start(config.trainer), {}).model()
    adam, routing = optimizer.build(config, built), models.kept_routing(config, built.hf)

    def learned(learner: Learner, logprob: float, replayed: bool = False) -> list[Any]:
        """[metrics of each update, broken rules, why it is untrained, whether weights changed], or what ended the run."""
        before = snapshot(built)
        try:
            found = learner.learn(controller.lease(routing, logprob, replayed), "rl", VERSION, lambda: None)
        except AsyncmoeError as error:
            return [f"{type(error).__name__}: {error}"]
        changed = any(not torch.equal(a, b) for a, b in zip(before, snapshot(built), strict=True))
        figures = [[one.updated, one.refused, one.figures["kl_reference"], one.figures["clip_fraction"]] for one in found.updates]
        return [figures, list(found.anomalies), found.untrained, changed]

    def learner(config: Config) -> Learner:
        samples = TrainerSamples(config, built.mesh, 0, 0)
        return Learner(config, built, adam, partial(held.fetch, controller), start.replay(config, built), NO_PLUGINS, samples)

    first, strict = learner(config), learner(configuration(path, layout, {"max_logprob_diff": 1e-6}))
    found = {
        "healthy": learned(first, -1.0),
        "far": [learned(first, -9.0) for _ in range(2)],
        "replayed": learned(strict, -1.0, replayed=True),
        "apart": learned(strict, -1.0),
    }
    controller.gone = True
    gone = learned(first, -1.0)[0]
    return group.everyone([found, built.mesh.tp_rank, controller.asked > 0, gone])


def configuration(path: Path, layout: str, verify: dict[str, Any]) -> Config:
    sections: dict[str, Any] = {
        "warmup": {"steps": 0},
        "rollout": {"groups_per_step": 2, "group_size": 2},
        "objective": {"updates_per_batch": 2, "kl": {"coefficient": 0.1}},
        "verify": verify,
        "trainer": {"tokens_per_microbatch": 32, "timeout_s": 60, "ranks": dist.get_world_size(), **case.settings_of(layout)},
    }
    return minimal(path / "run", path / "hf", 9, **sections)


if __name__ == "__main__":
    group.run(main)
