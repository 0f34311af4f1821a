"""A pack trains its steps as the run did, and tells nothing else about the machine that it comes from."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from asyncmoe import checkpoints
from asyncmoe.checkpoints import directories, intact
from asyncmoe.config import moved
from asyncmoe.errors import DataError
from asyncmoe.flight import records
from asyncmoe.flight.batches import Batches
from asyncmoe.flight.pack import pack, verify
from tests.unit.asynchronous import asynchronous
from tests.unit.flight_runs import FlightRun, begun, configured, write_records
from tests.unit.test_checkpoints import flip

PASSWORD = "hunter2"
OWN = {
    "mine/__init__.py": "",
    "mine/parts.py": "from . import more\nimport helper, math\n",
    "mine/more.py": "",
    "helper.py": "",
    "other.py": "",
}


async def trained(tmp_path: Path, saves: tuple[int, ...], **sections: Any) -> FlightRun:
    """A run of six steps."""
    run = await begun(tmp_path / "run")
    config = configured(run.folder, saves, **sections)
    for step in range(6):
        await run.step(step, "why" if step == 3 else "")
    run.life.log.close()
    write_records(run.folder, config, range(1, 7), starts=(0, 3))
    (run.folder / "origin.json").write_text(f'{{"task.path": "{tmp_path}", "model.path weights": "3 bytes"}}')
    return run


def content(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@asynchronous
async def test_a_pack_has_what_its_steps_need_and_nothing_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in OWN.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    (tmp_path / "code" / "mine" / "parts.py").write_text(OWN["mine/parts.py"] + "def advantage(): ...\n")
    monkeypatch.syspath_prepend(tmp_path / "code")
    options = {"api_key": PASSWORD, "file": f"{tmp_path}/x.json", "url": f"https://me:{PASSWORD}@host/a/b", "nested": {"token": [PASSWORD]}}
    run = await trained(
        tmp_path,
        (1, 2, 4),
        objective={"advantage": "mine.parts:advantage", "advantage_options": options},
        log={"folder": str(tmp_path / "run" / "log")},
        engines={"python": str(tmp_path / "python")},
        trainer={"checkpoint_copy": f"s3://me:{PASSWORD}@bucket/a"},
        telemetry={"wandb": {}},
    )
    flip(checkpoints.directory(run.folder, 2) / "common.pt")  # so the one before it is packed
    parts = await asyncio.to_thread(pack, run.folder, 3, 4, tmp_path / "made")
    shutil.move(tmp_path / "made", tmp_path / "far" / "pack")
    out = tmp_path / "far" / "pack"
    verify(out)
    found = content(out)
    assert {name for name, data in found.items() if str(tmp_path).encode() in data or PASSWORD.encode() in data} == set()
    assert sum(parts.values()) == sum(map(len, found.values())) - len(found["manifest.json"])
    assert {name.removeprefix("plugins/") for name in found if name.startswith("plugins/")} == OWN.keys() - {"other.py"}
    assert {name for name in found if "lock" in name or name.endswith(".safetensors")} == set()
    assert moved.is_run(out)
    config = moved.of_run(out)
    assert config.model.path == out / "model"
    assert config.objective.advantage_options == {
        "api_key": "(hidden)", "file": "x.json", "url": "https://(hidden)@host/a/b", "nested": {"token": ["(hidden)"]}
    }  # fmt: skip
    assert (config.trainer.checkpoint_copy, config.telemetry.wandb, config.engines.python) == (None, None, Path("python"))
    assert [path.name for path in directories.complete(out)] == ["step-00000001"]
    assert intact.fault(checkpoints.directory(out, 1)) is None
    assert checkpoints.facts(checkpoints.directory(out, 1)) == {"step": 1, "origin": {"model.path weights": "3 bytes"}}
    there, here = records.read(run.folder), records.read(out)
    assert here.steps == {step: there.steps[step] for step in (2, 3, 4)}
    assert [here.starts[step].started_at for step in (2, 3, 4)] == [0, 0, 3]
    assert here.starts[4].config == yaml.safe_load(found["config.yaml"])
    batches = Batches(out, config.log)
    assert (batches.kept, batches.ended) == ([range(1, 4)], {1: "", 2: "", 3: "why"})
    for step in range(1, 4):
        leased, frames = run.trained[step]
        again = batches.leased(step)
        assert [msgspec.structs.replace(item, place=None) for item in again.items] == [
            msgspec.structs.replace(item, place=None) for item in leased.items
        ]
        assert b"".join(map(bytes, batches.frames(again.items, None, True))) == frames
    for name in ("config.yaml", "trained.jsonl", "checkpoints/step-00000001/common.pt", "model/config.json"):
        flip(out / name)
        with pytest.raises(DataError, match=f"got {name} has other content"):
            verify(out)
        flip(out / name)


@asynchronous
@pytest.mark.parametrize(
    ("first", "saves", "sections", "weights"),
    [
        (1, (), {}, True),
        (2, (1,), {}, False),
        (2, (1,), {"train": "lora"}, True),
        (2, (1,), {"objective": {"kl": {"coefficient": 0.1}}}, True),
    ],
)
async def test_weights_are_packed_if_training_reads_them(
    tmp_path: Path, first: int, saves: tuple[int, ...], sections: dict[str, Any], weights: bool
) -> None:
    run = await trained(tmp_path, saves, **sections)
    await asyncio.to_thread(pack, run.folder, first, 6, tmp_path / "out")
    assert (tmp_path / "out" / "model" / "model.safetensors").exists() == weights
    assert moved.is_run(tmp_path / "out")
    assert Batches(tmp_path / "out", moved.of_run(tmp_path / "out").log).kept == [range(len(saves), 6)]


@asynchronous
async def test_steps_that_a_run_lacks_are_refused(tmp_path: Path) -> None:
    run = await trained(tmp_path, (2,))
    shutil.rmtree(run.folder / "log" / "1")
    for first, last in ((3, 4), (6, 9), (4, 3)):
        with pytest.raises(DataError, match=rf"^steps: got {first} to {last}, expected steps of .* that can be replayed: none"):
            pack(run.folder, first, last, tmp_path / "out")
    assert not (tmp_path / "out").exists()
