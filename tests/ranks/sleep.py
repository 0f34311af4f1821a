"""Worker: bits of the state after training with and without sleep between the steps, and the memory that a sleep frees.
`sleep.py RESULT PATH CASE...`, as `deterministic.py`."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import torch

from asyncmoe.config import Config
from asyncmoe.errors import StorageError
from asyncmoe.occupancy import TRAINER, Held, MemoryPart
from asyncmoe.trainer.model import gpt
from asyncmoe.trainer.model.sleep import Sleeper, _File
from tests.ranks import group
from tests.ranks.deterministic import trained

NOTHING: Held = frozenset()
SENT: Held = frozenset({MemoryPart.PARAMETERS})
TURNS = 4


def main(path: str, *cases: str) -> list[Any]:
    torch.set_num_threads(2)
    Path(path, "run").mkdir(exist_ok=True)
    return group.everyone({one: both(Path(path), *one.split(":")) for one in cases})


def both(path: Path, variant: str, layout: str) -> dict[str, Any]:
    """Of each sleep: bytes held before, freed in each phase, and at the end in use again; and whether the bits are equal."""
    sleeps: list[list[int]] = []
    sleepers: dict[int, Sleeper] = {}

    def between(config: Config, built: gpt.Model, adam: Any) -> None:
        sleeper = sleepers.setdefault(0, Sleeper(config, built, adam, list))
        for _ in range(TURNS):
            parts = {name: [*sleeper._storages_of(name).values()] for name in ("parameters", "frozen", "gradients", "optimizer")}
            assert bool(parts["frozen"]) is (config.adapter is not None)
            sleeping = {name for name in parts if parts[name] and (name if name != "frozen" else "parameters") in config.trainer.sleep}
            held = sum(one.nbytes() for name in sleeping for one in parts[name])
            used = [held, psutil.Process().memory_full_info().uss]
            for turn in (SENT, NOTHING, SENT, TRAINER):
                sleeper.hold(turn)
                away = {name for name in sleeping if not any(one.nbytes() for one in parts[name])}
                assert away == {NOTHING: sleeping, SENT: sleeping - {"parameters"}, TRAINER: set()}[turn]
                used.append(psutil.Process().memory_full_info().uss)
            sleeps.append(used)

    slept = trained(path, variant, layout, between)
    return {"sleeps": sleeps, "equal": slept == trained(path, variant, layout), "full": full(path)}


def full(path: Path) -> str:
    """What is said if the file cannot take what sleeps."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        _File(path).keep("parameters", [torch.zeros(1 << 20).untyped_storage()])
    except StorageError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


if __name__ == "__main__":
    group.run(main)
