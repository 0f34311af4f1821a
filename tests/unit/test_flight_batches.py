"""The batches of a run are read back as they were trained: beside its writers and after restarts. An error names what is lost."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from asyncmoe.cli import app
from asyncmoe.config.log import LogSection
from asyncmoe.errors import DataError, StorageError
from asyncmoe.flight.batches import Batches, leases_in, ranges, replayable, told
from asyncmoe.log import belonging, files
from asyncmoe.log.log import Place
from asyncmoe.queue import records
from asyncmoe.queue.fold import LogState
from tests.redis_server import needed
from tests.unit.asynchronous import asynchronous
from tests.unit.example_counts import examples
from tests.unit.flight_runs import FlightRun, begun, configured, write_records
from tests.unit.log_lives import home_of
from tests.unit.test_checkpoints import saved


def check(run: FlightRun, batches: Batches, steps: range) -> None:
    """The batches of these steps are those that were trained."""
    assert [step for one in batches.kept for step in one if step in steps] == [*steps]
    for step in steps:
        leased, frames = run.trained[step]
        for _ in range(2):
            found = batches.leased(step)
            assert (found.items, found.lineage, found.replayed) == (leased.items, batches.leases[step].history, True)
            assert b"".join(map(bytes, batches.frames(found.items, None, True))) == frames


OPERATIONS = st.tuples(st.sampled_from(["train", "train", "skip", "restart", "forget"]), st.integers(0, 3))


@settings(max_examples=examples(30))
@given(operations=st.lists(OPERATIONS, max_size=14))
def test_batches_are_read_as_they_were_trained(operations: list[tuple[str, int]]) -> None:
    async def body(folder: Path) -> None:
        run, step, floor, last = await begun(folder / "run"), 0, 0, dict[int, str]()
        for number, (what, back) in enumerate(operations):
            if what == "restart":
                step = max(step - back, floor)
                await run.restart(folder / str(number), step)
                last = {one: why for one, why in last.items() if one < step}
            elif what == "forget":
                floor = max(step - back, floor)
                await run.life.log.forget(floor)
            else:
                last[step] = "why" if what == "skip" else ""
                await run.step(step, last[step])
                step += 1
        await run.life.log.settled()
        batches = run.batches()  # beside the live writers
        check(run, batches, range(floor, max(run.trained, default=-1) + 1))
        assert {one: why for one, why in batches.ended.items() if one >= floor} == {one: why for one, why in last.items() if one >= floor}
        run.life.log.close()
        check(run, batches, range(floor, max(run.trained, default=-1) + 1))

    with TemporaryDirectory() as folder:
        asyncio.run(body(Path(folder)))


def lease(step: int, number: int) -> records.StepLeased:
    return records.StepLeased(step, 2, step, 0, (records.LeasedGroup(number, 1.0, ("k",), number, 2, Place(1, number)),))


STEPS = st.integers(0, 3)
CHANGES = st.one_of(
    st.builds(lease, STEPS, st.integers(0, 99)),
    st.builds(records.StepCommitted, STEPS, st.sampled_from(["", "why"]), st.just(())),
    st.builds(records.StepReleased, STEPS),
    st.builds(records.RunStands, st.just(0), st.just(0), st.just(0), again=st.none() | STEPS),
)


@given(changes=st.lists(CHANGES, max_size=20))
def test_the_newest_lease_counts_as_for_the_queue(changes: list[records.Change]) -> None:
    state = LogState()
    for position, change in enumerate(changes):
        state.apply(position, change)
    leases, ended = leases_in(changes)
    assert leases == {step: one.terms for step, one in state.leases.items() if one.terms is not None}
    assert ended == {step: one.ended for step, one in state.leases.items() if one.ended is not None}


@asynchronous
async def test_a_part_is_sent_as_by_a_rollout_worker(tmp_path: Path) -> None:
    run = await begun(tmp_path / "run")
    await run.step(0)
    batches = run.batches()
    items = batches.leased(0).items[::-1]
    places = [item.place for item in items if item.place is not None]
    for layers, masks in ((None, True), ((1, 2), False), ((), True), (None, False)):
        sent = await run.life.log.worker.fetch([item.key for item in items], places, layers, masks)
        assert [*map(bytes, batches.frames(items, layers, masks))] == [*map(bytes, sent)]
    run.life.log.close()


@asynchronous
async def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = await begun(tmp_path / "run")
    for step in range(3):
        await run.step(step)
    await run.life.log.settled()
    batches = run.batches()
    with pytest.raises(DataError, match=r"^step 8 of .*: got a step whose batch was never leased, expected one of the kept steps: 1 to 3$"):
        batches.leased(7)
    run.life.log.close()
    batches.leases.pop(0)
    with pytest.raises(DataError, match=r"^step 1 of .*: got a step that is no longer kept, .*: 2 to 3$"):
        batches.leased(0)
    group = batches.leases[1].groups[1]
    wrong = batches.leases[1].groups[0]
    batches.leases[1] = records.StepLeased(1, 4, 1, 0, (wrong, records.LeasedGroup(group.number, 1.0, ("other",), 1, 2, group.place)))
    with pytest.raises(DataError, match=rf"^group {group.number} of .*: got other trajectories, .*, expected those leased, .*other"):
        batches.leased(1)
    place = batches.leases[2].groups[1].place
    first = max(first for first in files.segments_in(run.folder / "log" / "1") if first <= place.position)
    segment = files.path_of(run.folder / "log" / "1", first)
    content = bytearray(segment.read_bytes())
    content[files.HEADER_BYTES + place.position - first + 40] ^= 1
    segment.write_bytes(content)
    number = batches.leases[2].groups[1].number
    with pytest.raises(
        DataError, match=rf"^group {number} of .*: got a damaged record at log .*, expected its payload .*, step 3 cannot be"
    ):
        batches.leased(2)
    shutil.rmtree(run.folder / "log" / "1")
    assert run.batches().kept == []
    with pytest.raises(DataError, match=r"got No such file or directory at log .*1 position \d+, expected its payload"):
        batches.leased(2)
    controller = max((run.folder / "log" / "0").glob("*.segment"))
    controller.write_bytes(controller.read_bytes() + b"AMrc torn")
    assert run.batches().leases.keys() == {0, 1, 2}
    shutil.rmtree(run.folder / "log")
    with pytest.raises(DataError, match=r"^log: got .*log, which does not exist here, expected .*; it was deleted"):
        run.batches()
    with pytest.raises(DataError, match=r"^log: got .*far, .*; log\.folder is on another machine"):
        Batches(run.folder, LogSection(folder=tmp_path / "far"))
    (run.folder / belonging.MARKER).unlink()
    with pytest.raises(DataError, match=r"^RUN: got .* no log\.json"):
        run.batches()


@needed()
@asynchronous
async def test_redis_is_read_beside_its_writer(tmp_path: Path) -> None:
    with home_of("redis") as home:
        assert home.server is not None
        run = await begun(tmp_path / "run", home)
        section = LogSection(redis=f"{home.server.url}?db={home.number(run.folder)}")
        for step in range(4):
            await run.step(step)
            check(run, Batches(run.folder, section), range(step + 1))
        await run.life.log.forget(2)
        batches = Batches(run.folder, section)
        check(run, batches, range(2, 4))
        assert batches.kept == [range(2, 4)]
        await run.step(4)  # the reader displaced nobody
        run.life.log.close()
        home.server.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("asyncmoe.flight.batches._PATIENCE_S", 0.0)
            with pytest.raises(StorageError, match=r"^log\.redis: .* does not answer"):
                Batches(run.folder, section)


def test_steps_can_be_replayed_from_a_checkpoint_on(tmp_path: Path) -> None:
    for step in (4, 8, 30):
        saved(tmp_path, step)
    kept = [range(0, 2), range(6, 12), range(20, 25)]
    assert replayable(tmp_path, kept, range(1, 99)) == [range(1, 3), range(9, 13)]
    assert replayable(tmp_path, kept, range(10, 12)) == []
    assert ranges([]) == []
    assert (told(kept, 1), told([range(3, 4)]), told([])) == ("1 to 2, 7 to 12, 21 to 25", "3", "none")


@asynchronous
async def test_the_command_says_which_steps_can_be_replayed(tmp_path: Path) -> None:
    run = await begun(tmp_path / "run")
    config = configured(run.folder, [2])
    for step in range(4):
        await run.step(step)
    run.life.log.close()
    write_records(run.folder, config, range(1, 4))  # the last step is not trained yet
    said = CliRunner().invoke(app, ["log", str(run.folder)]).output.splitlines()
    assert said[-1] == "steps 1 to 3 can be replayed, from the model's files"
    write_records(run.folder, config, range(2, 5), starts=(1,))
    said = CliRunner().invoke(app, ["log", str(run.folder)]).output.splitlines()
    assert said[-1] == "steps 3 to 4 can be replayed, from checkpoint step-00000002"
