"""Worker: bits of the state after training, with two threads a rank. `deterministic.py RESULT PATH CASE...`

PATH holds configurations of models by variant. A case is a variant, and settings of the trainer: "plain:tp=2,dtype=bfloat16,lora=1", where
lora=1 trains adapters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.log.log import Place
from asyncmoe.platform.megatron.any_layout import optimizers
from asyncmoe.queue.group_buffer import describe
from asyncmoe.rpc.messages import Leased
from asyncmoe.trainer import start
from asyncmoe.trainer.batch_trainer import Learner
from asyncmoe.trainer.data import held
from asyncmoe.trainer.model import deterministic, gpt, mesh, optimizer
from asyncmoe.trainer.objective import NO_PLUGINS
from asyncmoe.trainer.samples import TrainerSamples
from asyncmoe.trajectory import Routing
from tests.configs import minimal
from tests.ranks import case, group
from tests.ranks.learner import VERSION, Controller
from tests.ranks.leaving import leave
from tests.unit.kept_trajectory import trajectory

LENGTHS = (300, 210, 290, 190, 250, 270, 230, 280)
"""Tokens of the trajectories: a rank has so many rows that torch divides most operations between threads."""
STEPS = 2


class Batches(Controller):
    """Holds the batch that it made last."""

    def batch_of(self, step: int, routing: Routing | None) -> Leased:
        self.batch.clear()
        for seed, length in enumerate(LENGTHS):
            one = trajectory(length, 100 * step + seed, *([] if routing is None else [routing]))[0]
            of_group: dict[str, Any] = {"group": seed // 4, "episode": seed % 4, "reward": float(seed % 3), "prefix_version": VERSION}
            self.batch[one.key] = replace(one, logprobs=one.logprobs * 4, routes=one.routes if routing else None, **of_group)
        items = tuple(msgspec.structs.replace(describe(one), place=Place(1, 0)) for one in self.batch.values())
        return Leased(VERSION + step, items, 0, {})


def main(path: str, *cases: str) -> list[Any]:
    torch.set_num_threads(2)
    return group.everyone({one: trained(Path(path), *one.split(":")) for one in cases})


def trained(path: Path, variant: str, layout: str, between: Callable[[Config, gpt.Model, Any], None] = lambda *_: None) -> list[Any]:
    """[loss and gradient norm of each update, digests of weights and optimizer state, digests of a gradient, computed again and again]."""
    settings = case.settings_of(layout)
    adapters = bool(settings.pop("lora", False))
    settings |= {"sleep": settings["sleep"].split("+")} if "sleep" in settings else {}
    sections: dict[str, Any] = {
        "train": "lora" if adapters else "full",
        "lora": {"rank": 4},
        "rollout": {"groups_per_step": 2, "group_size": 4},
        "objective": {"updates_per_batch": 2},
        "verify": {"anomalies": {"kl_engine": {"above": 1e6}}},
        "trainer": {"tokens_per_microbatch": 600, "timeout_s": 60, "ranks": dist.get_world_size(), "optimizer": {"lr": 1e-3}, **settings},
    }
    config = minimal(path / "run", path / variant, 9, **sections)
    deterministic.start(config)
    place = mesh.start(config.trainer, config.run.seed)
    built = gpt.build(models.load_hf_config(path / variant), config, place)
    random = torch.Generator().manual_seed(place.rank)
    for weight in built.weights().values():
        weight.copy_(torch.randn(weight.shape, generator=random) * 0.1)
    adam, routing, controller = optimizer.build(config, built), models.kept_routing(config, built.hf), Batches()
    client: Any = controller
    samples, figures = TrainerSamples(config, place, 0, 0), []
    learner = Learner(config, built, adam, partial(held.fetch, client), start.replay(config, built), NO_PLUGINS, samples)
    for step in range(STEPS):
        made = learner.learn(controller.batch_of(step, routing), "rl", VERSION + step, lambda: None)
        between(config, built, adam)
        figures += [[one.loss.hex(), one.grad_norm.hex()] for one in made.updates if one.updated]
    found = [figures, {name: digest(value) for name, value in state(built, adam)}]
    leave()
    return [*found, [digest(looked_up()) for _ in range(20)]]


def looked_up() -> torch.Tensor:
    """Gradient of a table in which many rows look up the same place, as a user's loss may; two threads add to it at the same time."""
    random = torch.Generator().manual_seed(0)
    table = torch.zeros(64, 64, requires_grad=True)
    places, gradient = torch.randint(0, 64, (2048,), generator=random), torch.randn(2048, 64, generator=random)
    table[places].backward(gradient)
    assert table.grad is not None
    return table.grad


def state(built: gpt.Model, adam: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, adapters, and state of the optimizer, by name."""
    yield from built.weights().items()
    yield from built.adapter_values().items() if built.adapter is not None else ()
    for part, inner in enumerate(one.optimizer for one in optimizers(adam)):
        for number, parameter in enumerate(one for each in inner.param_groups for one in each["params"]):
            values = {"parameter": parameter, **inner.state[parameter]}
            yield from ((f"{part}.{number} {name}", value) for name, value in values.items())


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(bytes(value.detach().reshape(-1).view(torch.uint8).numpy())).hexdigest()


if __name__ == "__main__":
    group.run(main)
