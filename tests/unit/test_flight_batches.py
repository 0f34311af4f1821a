"""The batches of a run are read back as they were trained: beside its writers and after restarts. An error names what is lost."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from asyncmoe.cli import app
from asyncmoe.config.log import LogSection
from asyncmoe.errors import DataError, StorageError
from asyncmoe.flight import batches
from asyncmoe.flight.batches import Batches
from asyncmoe.log import belonging, files
from asyncmoe.queue.records import StepReleased
from tests.redis_server import needed
from tests.unit.asynchronous import asynchronous
from tests.unit.example_counts import examples
from tests.unit.flight_runs import PARTS, Trained, begun, configured, train
from tests.unit.log_lives import home_of, live

FOLDER = LogSection()


def check(found: Batches, trained: Trained, steps: Iterable[int]) -> None:
    assert {*steps} <= {*found.kept}
    for step in (*steps, *steps):
        items = found.leased(step).items
        assert items == trained[step][0].items
        assert [bytes(frame) for part in PARTS for frame in found.frames(items, *part)] == trained[step][1]


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.sampled_from(["train", "train", "skip", "restart", "forget"]), st.integers(0, 3)), max_size=14))
def test_batches_are_read_as_they_were_trained(operations: list[tuple[str, int]]) -> None:
    async def body(folder: Path) -> None:
        life, trained, ended, step, floor = await begun(folder / "run"), Trained(), dict[int, str](), 0, 0
        for number, (what, back) in enumerate(operations):
            if what == "restart":
                step = max(step - back, floor)
                life = await live(life.home, life.kill(folder / str(number)), step)
                life.queue.set_version(step)
                ended = {one: why for one, why in ended.items() if one < step}
            elif what == "forget":
                floor = max(step - back, floor)
                await life.log.forget(floor)
            else:
                ended[step] = "why" if what == "skip" else ""
                await train(life, step, trained, ended[step])
                step += 1
        await life.log.settled()
        check(Batches(life.folder, FOLDER), trained, range(floor, len(trained)))  # beside the writers, who may not have written the restart
        life.log.close()
        found = Batches(life.folder, FOLDER)
        check(found, trained, range(floor, len(trained)))
        assert [found.ended.get(one) for one in range(floor, len(trained))] == [ended.get(one) for one in range(floor, len(trained))]

    with TemporaryDirectory() as name:
        asyncio.run(body(Path(name)))


@asynchronous
async def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    life = await begun(tmp_path / "run")
    for step in range(4):
        await train(life, step, {})
    life.log._add(StepReleased(3))
    life.log.close()

    def refused(step: int, match: str) -> None:
        with pytest.raises(DataError, match=match):
            Batches(life.folder, FOLDER).leased(step)

    refused(7, "^step 8 of .*: got a step whose batch was never leased, expected a step from 1 to 3$")
    refused(-1, "^step 0 of .*: got a step that is no longer kept, expected a step from 1 to 3$")
    found = Batches(life.folder, FOLDER)
    group = found.leases[1].groups[0]
    found.leases[1] = msgspec.structs.replace(found.leases[1], groups=(msgspec.structs.replace(group, keys=("other",)),))
    with pytest.raises(DataError, match=rf"^group {group.number} of .*: got other trajectories, .*, expected those leased, .*other"):
        found.leased(1)
    first = max(first for first in files.segments_in(life.folder / "log" / "1") if first <= group.place.position)
    segment = files.path_of(life.folder / "log" / "1", first)
    content = bytearray(segment.read_bytes())
    content[files.HEADER_BYTES + group.place.position - first + 40] ^= 1
    segment.write_bytes(content)
    assert [step for step in range(3) if not Batches(life.folder, FOLDER).intact(step)] == [1]
    refused(1, rf"^group {group.number} of .*: got a damaged record at log .*, expected its payload .*; without it, step 2 cannot")
    shutil.rmtree(life.folder / "log" / "1")
    refused(2, r"got No such file or directory at log .*1 position \d+, expected its payload")
    segment = max((life.folder / "log" / "0").glob("*.segment"))
    segment.write_bytes(segment.read_bytes() + b"AMrc torn")
    found = Batches(life.folder, FOLDER)
    assert ([*found.leases], found.kept) == ([0, 1, 2], [])
    known = files.segments_in
    with pytest.MonkeyPatch.context() as patch:  # a writer deletes a segment after it was listed
        patch.setattr(files, "segments_in", lambda folder: [*known(folder), known(folder)[-1] + 4096])
        assert [*Batches(life.folder, FOLDER).leases] == [0, 1, 2]
    shutil.rmtree(life.folder / "log")
    refused(0, r"^log: got .*log, which does not exist here, expected .*; it was deleted")
    with pytest.raises(DataError, match=r"^log: got .*far, .*; log\.folder is on another machine"):
        Batches(life.folder, LogSection(folder=tmp_path / "far"))
    (life.folder / belonging.MARKER).unlink()
    refused(0, r"^RUN: got .* no log\.json")


@needed()
@asynchronous
async def test_redis_is_read_beside_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with home_of("redis") as home:
        assert home.server is not None
        life, trained = await begun(tmp_path / "run", home), Trained()
        section = LogSection(redis=f"{home.server.url}?db={home.number(life.folder)}")
        for step in range(4):
            await train(life, step, trained)
            check(Batches(life.folder, section), trained, trained)
        life.log.payloads.forget(min(item.place.position for item in trained[2][0].items if item.place is not None)).result()
        found = Batches(life.folder, section)
        assert ([*found.leases], found.kept) == ([0, 1, 2, 3], [2, 3])
        await train(life, 4, trained)  # the reader displaced nobody
        life.log.close()
        check(Batches(life.folder, section), trained, (2, 3, 4))
        home.server.close()
        monkeypatch.setattr(batches, "_PATIENCE_S", 0.0)
        with pytest.raises(StorageError, match=r"^log\.redis: .* does not answer"):
            Batches(life.folder, section)


@asynchronous
async def test_the_command_says_which_steps_can_be_replayed(tmp_path: Path) -> None:
    life = await begun(tmp_path / "run")
    for step in range(4):
        await train(life, step, {})
    life.log.close()
    for saves, steps, told in (
        ((), range(2, 5), "no step can be replayed: "),
        ((2,), range(2, 5), "steps 3 to 4 can be replayed, from checkpoint step-00000002"),
        ((), range(1, 4), "steps 1 to 3 can be replayed, from the model's files"),  # the last one is not trained yet
    ):
        configured(life.folder, saves, steps, starts=(steps[0] - 1,))
        assert CliRunner().invoke(app, ["log", str(life.folder)]).output.splitlines()[-1].startswith(told)
