"""The directory of a run with records of its trained steps, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from asyncmoe.flight import records
from asyncmoe.log import belonging
from asyncmoe.models.make import MadeModel, make_model
from asyncmoe.rpc.messages import Leased
from tests.configs import minimal
from tests.unit.kept_trajectory import trajectory
from tests.unit.log_lives import SIZE, Home, Life, live
from tests.unit.test_checkpoints import saved

PARTS: Sequence[tuple[tuple[int, ...] | None, bool]] = ((None, True), ((1, 2), False), ((), True))
"""Layers and masks to fetch."""
Trained = dict[int, tuple[Leased, list[bytes]]]
"""For each lease, the batch that was leased last, and the frames of each of `PARTS` as a rollout worker sends them."""


async def begun(folder: Path, home: Home | None = None) -> Life:
    """A run that has trained nothing."""
    folder.mkdir()
    belonging.write(folder, belonging.Belonging(belonging.FORM, {"run.seed": "0"}, begun=True, run="run"))
    return await live(home or Home(), folder)


async def train(life: Life, step: int, trained: Trained, skipped: str = "") -> None:
    """Lease and commit a step: as it was leased before, or with new groups, which have routes and masks."""
    for group in (2 * step, 2 * step + 1) if step not in trained else ():
        life.begin(group)
        made = [replace(trajectory(4, group)[0], key=f"g{group}.e{e}", group=group, episode=e) for e in range(SIZE)]
        await life.put([replace(one, versions=one.versions.clip(max=step)) for one in made])
    leased = await life.lease(step)
    asked = {item.key: item.place for item in leased.items if item.place is not None}
    trained[step] = leased, [bytes(frame) for part in PARTS for frame in await life.log.worker.fetch(asked, *part)]
    life.queue.commit(step, skipped)
    life.queue.set_version(step + 1)


def configured(folder: Path, saves: Sequence[int], steps: Sequence[int], starts: Sequence[int] = (0,), **sections: Any) -> None:
    """Give a run a model, checkpoints, and the records of steps, with starts of the trainer after some of them."""
    if not (folder / "model").exists():
        make_model(folder / "model", MadeModel(), seed=0)
    values = minimal(folder, folder / "model", 99, **sections).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    for step in saves:
        saved(folder, step)
    lines: list[msgspec.Struct] = []
    for step in steps:
        lines += [records.Started(step - 1, values, {"torch": "2"}, ("a",), True)] if step - 1 in starts else []
        lines.append(records.TrainedStep(step, "0" * 16, (), (False,), b"\1", 0.5, (0.25,), (1.0,), (b"\2",), b"\3", b"\4"))
    (folder / records.TRAINED).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
