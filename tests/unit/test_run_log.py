"""A producer, a queue and a trainer with a log: killed at any moment, they resume as if uninterrupted."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from asyncmoe.checkpoints import Retention, directories
from asyncmoe.cli import app
from asyncmoe.config import parse
from asyncmoe.config.schema import Config
from asyncmoe.engines.types import VersionSpan
from asyncmoe.errors import ConfigError, DataError, TrajectoryRejected
from asyncmoe.log import files
from asyncmoe.log.room import Room
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.records import Start
from asyncmoe.rollout import run_log
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.run_log import RunLog, WorkerLog
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import NOTHING, Recording, Trajectory
from asyncmoe.trajectory.native import crc32c
from tests.configs import minimal
from tests.unit.asynchronous import asynchronous
from tests.unit.generations import generation_of
from tests.unit.log_lives import Home, Life, live, settled
from tests.unit.test_checkpoints import saved
from tests.unit.test_producer import Numbers

SIZE, GROUPS = 2, 2
BATCH = SIZE * GROUPS
STEPS = 6


def configured(run_dir: Path, **log: Any) -> Config:
    return minimal(run_dir, steps=10, rollout={"groups_per_step": GROUPS, "group_size": SIZE}, log=log)


@dataclass
class Case:
    """A run in one process, to be killed after some steps of the loop.

    Attributes:
        started: groups whose first response was asked for, with the question, in order, of all lives.
        trained: keys by step, in the lineage behind the newest weights.
    """

    draw: random.Random
    started: list[tuple[int, str]] = field(default_factory=list)
    trained: dict[int, tuple[str, ...]] = field(default_factory=dict)
    leased: dict[int, Any] = field(default_factory=dict)
    version: int = 0
    step: int = 0

    async def life(self, folder: Path, until: float | None) -> None:
        """Go on from step `self.step`; after `until` leave the files as a kill does, or without it end after `STEPS` steps."""
        held = RunLog.open(configured(folder), NOTHING)
        resumed, queued = await held.resume(self.step)
        kept = WorkerLog.open(held._config.log, folder, held._run, 1, held.for_workers().under_way)
        worker = Worker(self._episode, SIZE, kept=kept)
        queue = self.queue = BoundedQueue(
            Admission(BATCH, 1),
            held.queue_log,
            capacity=4 * BATCH,
            group_size=SIZE,
            trained_steps=self.step,
            resumed=resumed,
            queued=queued,
            on_freed=worker.forget,
        )
        queue.set_version(self.step)
        producer = Producer(queue, Numbers(), worker, SIZE, filter_equal=True)
        tasks = [asyncio.create_task(producer.run()), asyncio.create_task(self._train(queue))]
        await asyncio.wait(tasks, timeout=until, return_when=asyncio.FIRST_COMPLETED)
        if until is not None:
            settled(held.queue_log._changes)  # nothing else runs meanwhile
            shutil.copytree(folder, folder.with_name(f"{folder.name}+"))
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        kept.close()
        held.queue_log.close()

    async def _episode(self, prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
        if place.episode == 0:
            self.started.append((place.group, prompt.text))
        version = self.queue.version
        await asyncio.sleep(self.draw.random() * 0.002)
        kind = (place.group * 7 + place.attempt * 3) % 11
        if kind == 1 and place.episode == 1 and place.attempt == 0:
            raise TrajectoryRejected("engine_died", "engine.0")
        if kind == 2 and place.episode == 0:
            raise TrajectoryRejected("scorer_nan", "no score")
        reward = 1.0 if kind == 3 else float(place.episode)
        generation = generation_of((7, place.group % 50), (-0.5, -0.25), (VersionSpan(str(version), 0, 2),), "stop", 0)
        return (assemble([Turn(prompt.tokens, generation, version)], place, Recording(), reward, {}),)

    async def _train(self, queue: BoundedQueue) -> None:
        while self.step < STEPS:
            leased = await queue.lease(self.step, "rl", BATCH, self.step, 10.0)
            assert leased.items
            assert self.leased.setdefault(self.step, leased.items) == leased.items
            await asyncio.sleep(self.draw.random() * 0.002)
            queue.commit(self.step)
            self.trained[self.step] = tuple(item.key for item in leased.items)
            self.step += 1
            queue.set_version(self.step)


@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 30), kills=st.integers(1, 3))
def test_a_run_killed_at_any_moment_goes_on_as_if_nothing_had_been(seed: int, kills: int) -> None:
    draw = random.Random(seed)
    case = Case(draw)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        for _ in range(kills):
            asyncio.run(case.life(place, draw.random() * 0.15))
            place = place.with_name(f"{place.name}+")
            case.step = draw.randrange(0, case.step + 1)
        asyncio.run(case.life(place, None))
    samples = [tuple(key.split(".")[:2]) for keys in case.trained.values() for key in keys]
    assert sorted(case.trained) == list(range(STEPS))
    assert len(set(samples)) == len(samples) == STEPS * BATCH
    first = list(dict(case.started))
    assert first == sorted(first) == list(range(len(first))), "prompts start in the order of an undisturbed run"
    questions: dict[int, set[str]] = {}
    for group, text in case.started:
        questions.setdefault(group, set()).add(text)
    assert all(len(texts) == 1 for texts in questions.values()), "a group keeps its question"


def opened(run_dir: Path, recording: Recording = NOTHING, **log: Any) -> RunLog:
    return RunLog.open(configured(run_dir, **log), recording)


def begun(run_dir: Path, number: int = 0) -> None:
    """Begin a group in a run."""

    async def body() -> None:
        held = opened(run_dir)
        await held.resume(0)
        held.queue_log.starts(Start(number))
        held.queue_log.close()

    asyncio.run(body())


RECORDED = {
    "keep.sampling_mask": Recording(masks=True),
    "objective.process.weight": Recording(rewards=True),
    "objective.distill.weight": Recording(teacher=True),
    "objective.score_centering": Recording(top=4),
}


@pytest.mark.parametrize("key", ["run.seed", "rollout.group_size", *RECORDED])
def test_a_log_belongs_to_what_its_groups_were_sampled_by(tmp_path: Path, key: str) -> None:
    config, recording = configured(tmp_path / "run"), RECORDED.get(key, NOTHING)
    values = config.model_dump()
    if key not in RECORDED:
        section, name = key.split(".")
        values[section][name] = 4
    other = parse(values)
    before, after = run_log.identity(config, NOTHING), run_log.identity(other, recording)
    assert [name for name in before if before[name] != after[name]] == [key]
    assert run_log.identity(configured(tmp_path / "moved"), NOTHING) == before
    for one in ((config, NOTHING), (other, recording), (config, NOTHING)):
        RunLog.open(*one).queue_log.close()  # no group has begun: it may belong to anything
    begun(tmp_path / "run")
    with pytest.raises(DataError, match=f"^{key}: got {after[key]}, expected {before[key]}, as log .* has it; "):
        RunLog.open(other, recording)
    with pytest.raises(DataError, match=f"^{key}: got "):
        run_log.belonging_of(other, recording)  # without opening it
    shutil.rmtree(tmp_path / "run" / "log")
    RunLog.open(other, recording).queue_log.close()  # it was deleted: all is sampled again


def another_run(run: Path) -> None:
    begun(run.with_name("other"))
    shutil.rmtree(run / "log")
    shutil.copytree(run.with_name("other") / "log", run / "log")


def other_format(run: Path) -> None:
    path = next((run / "log" / "0").glob("*.segment"))
    data = bytearray(path.read_bytes())
    data[8] += 1
    data[files.HEADER_BYTES - 4 : files.HEADER_BYTES] = crc32c(data[: files.HEADER_BYTES - 4]).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (another_run, "^log .*log: got the log of another run"),
        (other_format, "another run or version"),
    ],
)
def test_a_log_that_cannot_be_gone_on_with_is_refused(tmp_path: Path, spoil: Any, what: str) -> None:
    begun(tmp_path / "run")
    spoil(tmp_path / "run")
    with pytest.raises(DataError, match=what):
        opened(tmp_path / "run")


def test_another_folder_for_a_log_that_is_there_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    far = str(tmp_path / "far")
    with pytest.raises(ConfigError, match=r"^log\.folder: got .*/far, expected .*/log, where the run's log is"):
        opened(tmp_path, folder=far)
    shutil.move(tmp_path / "log", far)
    for _ in range(2):
        opened(tmp_path, folder=far).queue_log.close()


def test_a_log_that_is_gone_says_what_is_sampled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path)
    shutil.rmtree(tmp_path / "log")
    opened(tmp_path).queue_log.close()
    assert "is gone: what was queued or under way when the run stopped is sampled again" in caplog.text


def test_the_command_verifies_a_log(tmp_path: Path) -> None:
    begun(tmp_path)
    good = CliRunner().invoke(app, ["log", str(tmp_path)])
    assert (good.exit_code, good.output.splitlines()[0]) == (0, "0: 2 records, 0.00 MiB, whole")
    begun(tmp_path, 1)
    path = min((tmp_path / "log" / "0").glob("*.segment"))
    whole = path.read_bytes()
    for content, told in ((whole[:-1] + b"?", "positions "), (whole[:30] + b"?" + whole[31:], "the header of "), (b"", "the header of ")):
        path.write_bytes(content)
        bad = CliRunner().invoke(app, ["log", str(tmp_path)])
        assert bad.exit_code == 1
        assert f"damaged: {told}" in bad.output


# ---------------------------------------------------------------- the recorded window


async def recorded(folder: Path, first: int, after: int, max_bytes: int = 1 << 24, **log: Any) -> tuple[RunLog, Life]:
    """Train steps of a run that saves every second step."""
    life = await live(Home(), folder, first, max_bytes=max_bytes)
    life.queue.set_version(first)
    held = RunLog(configured(folder, max_bytes=max_bytes, **log), life.log, "run")
    for step in range(first, after):
        await life.train(step)
        if step % 2:
            saved(folder, step + 1, asked=Retention.of(held._config), files={"x": b"x" * 100})
            await held.saved()
        await held.shrink()
    return held, life


def window(folder: Path) -> tuple[int, list[int]]:
    return directories.window_begins(folder), directories.steps_of(folder)


@asynchronous
@pytest.mark.parametrize(("keep", "begin", "steps"), [(None, 16, [16, 18]), (5, 10, [10, 16, 18]), ("all", 0, [16, 18])])
async def test_a_restart_keeps_the_window_and_a_wider_one_begins_where_the_records_do(
    tmp_path: Path, keep: Any, begin: int, steps: list[int]
) -> None:
    _, life = await recorded(tmp_path, 0, 18, keep=keep)
    assert window(tmp_path) == (begin, steps)
    assert sorted(life.log.state.recorded) == list(range(begin, 18))
    life.log.close()
    _, life = await recorded(tmp_path, 18, 22, keep="all")
    assert window(tmp_path) == (begin, sorted({begin, 20, 22} - {0}))
    assert set(range(begin, 22)) <= set(life.log.state.recorded)
    life.log.close()
    shutil.rmtree(tmp_path / "log")
    _, life = await recorded(tmp_path, 22, 24, keep="all")
    assert window(tmp_path)[0] == 22
    life.log.close()


@asynchronous
async def test_a_log_that_nears_its_bound_records_fewer_steps_and_the_run_goes_on(tmp_path: Path) -> None:
    _, life = await recorded(tmp_path, 0, 60, max_bytes=40_000, keep=20)
    begin, steps = window(tmp_path)
    assert 40 < begin <= 56
    assert begin == steps[0]
    life.log.close()


@asynchronous
async def test_a_full_disk_shortens_the_window_to_what_a_resume_needs_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held, life = await recorded(tmp_path, 0, 19, keep=4)
    assert window(tmp_path) == (14, [14, 16, 18])
    shrunk = []
    for free in (1 << 31, 1 << 30, 1 << 30):
        held.room = lambda free=free: Room(0, free, 20 << 30)
        shrunk.append(await held.shrink())
    assert shrunk == [False, True, False], "a resume needs the rest"
    assert window(tmp_path) == (16, [16, 18])
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert said.startswith("log.keep: steps 15 to 16 are deleted: ")
    assert said.endswith("; 3 steps are kept")
    life.log.close()


def test_the_room_of_a_log_is_the_size_of_its_files_and_is_lacking_before_they_fill_it(tmp_path: Path) -> None:
    assert files.room(tmp_path, ["1"]).largest == 0
    log = files.FileLog(tmp_path, "run", "1", 1 << 20, 1 << 12)
    for _ in range(100):
        log.append([bytes(200)])
    settled(log)
    log.forget(9000).result()
    found = files.room(tmp_path, ["1", "2"])
    assert found.largest == pytest.approx(log.size, abs=10 * files.HEADER_BYTES)
    assert [bool(found.lacking(log.size * share // 2, 0)) for share in (2, 4)] == [True, False]
    assert found.lacking(1 << 20, found.free), "the next checkpoint needs its room"
    log.close()
