"""A pack trains its steps as the run did, and tells nothing else about the machine that it comes from."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from asyncmoe import checkpoints
from asyncmoe.checkpoints import directories, intact
from asyncmoe.config import moved
from asyncmoe.errors import DataError
from asyncmoe.flight import records
from asyncmoe.flight.batches import Batches
from asyncmoe.flight.pack import pack, verify
from tests.unit.flight_runs import PARTS, Trained, begun, configured, train
from tests.unit.test_checkpoints import flip

PASSWORD = "hunter2"
OWN = {"mine/__init__.py": "", "mine/parts.py": "from . import more\nimport tools.helper\n\ndef advantage(): ...\n", "mine/more.py": ""}
CODE = {**OWN, "tools/__init__.py": "", "tools/helper.py": "import math", "other.py": ""}


def ran(tmp_path: Path, saves: tuple[int, ...], **sections: Any) -> tuple[Path, Trained]:
    """A run of six steps."""

    folder, trained = tmp_path / "run", Trained()

    async def body() -> None:
        life = await begun(folder)
        for step in range(6):
            await train(life, step, trained, "why" if step == 3 else "")
        life.log.close()

    asyncio.run(body())
    configured(folder, saves, range(1, 7), (0, 3), **sections)
    (folder / "origin.json").write_text(f'{{"task.path": "{tmp_path}", "model.path weights": "3 bytes"}}')
    return folder, trained


def test_a_pack_has_what_its_steps_need_and_nothing_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in CODE.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "code")
    options = {"api_key": PASSWORD, "file": f"{tmp_path}/x.json", "url": f"https://me:{PASSWORD}@host/a/b", "nested": {"token": [PASSWORD]}}
    objective, places = {"advantage": "mine.parts:advantage", "advantage_options": options}, {"python": f"{tmp_path}/python"}
    trainer, log = {"checkpoint_copy": f"s3://me:{PASSWORD}@bucket/a"}, {"folder": f"{tmp_path}/run/log"}
    folder, trained = ran(tmp_path, (1, 4), objective=objective, engines=places, trainer=trainer, log=log, telemetry={"wandb": {}})
    parts = pack(folder, 3, 4, tmp_path / "made")
    out = tmp_path / "far" / "pack"
    shutil.move(tmp_path / "made", out)
    verify(out)
    found = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert [name for name, data in found.items() if str(tmp_path).encode() in data or PASSWORD.encode() in data] == []
    assert {line.partition(":")[0] for line in parts} == {name.partition("/")[0] for name in found} - {"manifest.json"}
    assert {name.removeprefix("plugins/") for name in found if name.startswith("plugins/")} == CODE.keys() - {"other.py"}
    assert [name for name in found if "lock" in name or name.endswith(".safetensors")] == []
    config = moved.of_run(out)
    assert (config.model.path, config.engines.python) == (out / "model", Path("python"))
    assert (config.trainer.checkpoint_copy, config.telemetry.wandb) == (None, None)
    shown = {"api_key": "(hidden)", "file": "x.json", "url": "https://(hidden)@host/a/b", "nested": {"token": ["(hidden)"]}}
    assert config.objective.advantage_options == shown
    (checkpoint,) = directories.complete(out)
    assert (checkpoints.facts(checkpoint), intact.fault(checkpoint)) == ({"step": 1, "origin": {"model.path weights": "3 bytes"}}, None)
    there, here = records.read(folder), records.read(out)
    assert here.steps == {step: there.steps[step] for step in (2, 3, 4)}
    assert [here.starts[step].started_at for step in (2, 3, 4)] == [0, 0, 3]
    assert here.starts[4].config == yaml.safe_load(found["config.yaml"])
    batches = Batches(out, config.log)
    assert (batches.kept, batches.ended) == ([1, 2, 3], {1: "", 2: "", 3: "why"})
    for step in (1, 2, 3):
        items, (leased, frames) = batches.leased(step).items, trained[step]
        assert [bytes(frame) for part in PARTS for frame in batches.frames(items, *part)] == frames
        assert [replace(one, place=None) for one in items] == [replace(one, place=None) for one in leased.items]
    for name in ("config.yaml", "trained.jsonl", "checkpoints/step-00000001/common.pt"):
        flip(out / name)
        with pytest.raises(DataError, match=f"got {name} has other content"):
            verify(out)
        flip(out / name)


@pytest.mark.parametrize("keys", [{}, {"train": "lora"}, {"objective": {"kl": {"coefficient": 0.1}}}])
def test_weights_are_packed_if_training_reads_them(tmp_path: Path, keys: dict[str, Any]) -> None:
    folder, _ = ran(tmp_path, (1,), **keys)
    for first in (1, 2):
        pack(folder, first, 6, tmp_path / str(first))
        assert (tmp_path / str(first) / "model" / "model.safetensors").exists() == (first == 1 or bool(keys))
        assert moved.is_run(tmp_path / str(first))


def test_a_pack_begins_before_a_damaged_checkpoint_and_steps_that_a_run_lacks_are_refused(tmp_path: Path) -> None:
    folder, _ = ran(tmp_path, (2,))
    with pytest.raises(DataError, match=r"step 7 without a record.*steps 1 to 6 can be replayed"):
        pack(folder, 6, 9, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    flip(directories.directory(folder, 2) / "common.pt")
    pack(folder, 3, 4, tmp_path / "out")
    assert sorted(records.read(tmp_path / "out").steps) == [1, 2, 3, 4]
    assert not directories.complete(tmp_path / "out")
