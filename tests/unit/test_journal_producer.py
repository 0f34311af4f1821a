"""A producer, a queue and a trainer around a journal: killed at any moment, they go on as if nothing had been."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.config import parse
from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError, DataError, TrajectoryRejected
from asyncmoe.journal import states_file
from asyncmoe.journal.in_redis.entries import pack, unpack
from asyncmoe.journal.rows import Change
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.rounds import Rounds
from asyncmoe.queue.start_order import Start
from asyncmoe.rollout import journaling
from asyncmoe.rollout.engines.types import Generation, VersionSpan
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.rollout.journaling import Journaling
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.trajectory import NOTHING, Recording, Trajectory
from tests.unit.test_producer import Numbers

HF: dict[str, Any] = {"hidden_size": 8}
SIZE, GROUPS = 2, 2
BATCH = SIZE * GROUPS
STEPS = 6


def configured(run_dir: Path, **journal: Any) -> Config:
    return parse(
        {
            "run": {"dir": str(run_dir), "steps": 10},
            "model": {"path": "model"},
            "task": {"kind": "arithmetic"},
            "rollout": {"groups_per_step": GROUPS, "group_size": SIZE},
            "journal": journal,
        }
    )


@dataclass
class Case:
    """A run in one process, to be killed after some steps of the loop.

    Attributes:
        started: groups whose first response was asked for, with the question, in order, of all lives.
        trained: keys by step, in the lineage behind the newest weights.
    """

    draw: random.Random
    unit: Any
    oversample: int
    tail: float
    started: list[tuple[int, str]] = field(default_factory=list)
    trained: dict[int, tuple[str, ...]] = field(default_factory=dict)
    leased: dict[int, Any] = field(default_factory=dict)
    version: int = 0
    step: int = 0

    async def life(self, folder: Path, until: float | None) -> None:
        """Go on from step `self.step`; after `until` leave the files as a kill does, or without it end after `STEPS` steps."""
        held = Journaling.open(configured(folder), HF, NOTHING)
        resumed = await held.resume(self.step)
        queue = self.queue = BoundedQueue(
            capacity=4 * BATCH,
            batch=BATCH,
            group_size=SIZE,
            max_staleness=1,
            trained_steps=self.step,
            journal=held.journal,
            resumed=resumed,
        )
        queue.set_version(self.step)
        options: Any = {"oversample": self.oversample, "unit": self.unit, "filter_equal": True, "journal": held.journal}
        options["rounds"] = Rounds(GROUPS, self.tail)
        producer = Producer(queue, Numbers(), self._episode, SIZE, held.first_group, **options)
        tasks = [asyncio.create_task(producer.run()), asyncio.create_task(self._train(queue))]
        await asyncio.wait(tasks, timeout=until, return_when=asyncio.FIRST_COMPLETED)
        if until is not None:
            held.journal._states.read(lambda connection: None)  # type: ignore[attr-defined]  # nothing else runs meanwhile
            shutil.copytree(folder, folder.with_name(f"{folder.name}+"))
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        await held.close()

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
        generation = Generation.of((7, place.group % 50), (-0.5, -0.25), (VersionSpan(str(version), 0, 2),), "stop", 0)
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
@given(
    seed=st.integers(0, 1 << 30),
    kills=st.integers(1, 3),
    unit=st.sampled_from(["group", "trajectory"]),
    spare=st.integers(0, 1),
    tail=st.sampled_from([1.0, 1.0, 1.5]),
)
def test_a_run_killed_at_any_moment_goes_on_as_if_nothing_had_been(seed: int, kills: int, unit: str, spare: int, tail: float) -> None:
    draw = random.Random(seed)
    case = Case(draw, unit if tail == 1 else "group", spare, tail)
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
    stats = case.queue.stats()
    ended = sum(sum(one.values()) for one in (stats.dropped, stats.rejected, stats.requeued))
    assert stats.started == stats.running + stats.depth + stats.leased + stats.trained + ended


def test_without_a_journal_nothing_is_kept_and_a_run_that_has_one_needs_it(tmp_path: Path) -> None:
    async def body(**journal: Any) -> Path:
        held = Journaling.open(configured(tmp_path, **journal), HF, NOTHING)
        resumed = await held.resume(3)
        assert held.first_group == 3 * GROUPS
        assert not resumed.queued
        await held.saved()
        await held.close()
        return tmp_path / "journal"

    assert not asyncio.run(body(enabled=False)).exists()
    assert asyncio.run(body()).is_dir()
    asyncio.run(body(enabled=False))
    (tmp_path / "journal.json").write_text('{"journal": "x", "begun": true}')
    with pytest.raises(
        ConfigError, match=r"journal\.enabled: got false, expected true, because the run has a journal; or delete .*journal"
    ):
        asyncio.run(body(enabled=False))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"run": {"seed": 3}}, "run.seed"),
        ({"task": {"difficulty": 2}}, "task"),
        ({"rollout": {"group_size": 4}}, "rollout.group_size"),
        ({"warmup": {"steps": 4}}, "warmup.steps"),
        ({"model": {"path": "other"}}, "model"),
    ],
)
def test_a_journal_belongs_to_what_its_groups_were_sampled_by(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    values = configured(tmp_path).model_dump()
    for section, keys in change.items():
        values[section] |= keys
    before, after = journaling.identity(configured(tmp_path), HF, NOTHING), journaling.identity(parse(values), HF, NOTHING)
    assert [name for name in before if before[name] != after[name]] == [key]
    assert journaling.identity(configured(tmp_path / "moved"), HF, NOTHING) == before


def test_a_renamed_model_is_the_same_one(tmp_path: Path) -> None:
    config = configured(tmp_path)
    config.run.dir.mkdir(parents=True, exist_ok=True)
    journaling.belonging_of(config, HF, NOTHING).note(begun=True)
    config.journal.place(config.run.dir).mkdir(parents=True)
    (config.journal.place(config.run.dir) / states_file.FILE).touch()
    renamed = parse({**config.model_dump(), "model": {"path": "other"}})
    assert journaling.belonging_of(renamed, HF, NOTHING).of == journaling.identity(config, HF, NOTHING)
    with pytest.raises(DataError, match=r"^model: got other \w+, expected \S+ \w+, as the journal "):
        journaling.belonging_of(renamed, {**HF, "rope_theta": 7}, NOTHING)


def test_the_newest_checkpoints_decide_what_is_kept(tmp_path: Path) -> None:
    assert journaling.oldest(tmp_path, 2) is None
    for name in ("step-00000004", "step-00000008", "step-00000012", "step-00000016.writing", "other"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert journaling.oldest(tmp_path, 2) == 8


def test_a_journal_that_does_not_reach_the_checkpoint_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async def body() -> None:
        held = Journaling.open(configured(tmp_path), HF, NOTHING)
        await held.resume(0)
        held.journal.begun(Start(0))
        await held.close()

    asyncio.run(body())
    newest = tmp_path / "checkpoints" / "step-00000002"
    newest.mkdir(parents=True)
    (newest / "asyncmoe.json").write_text('{"step": 2}')
    with pytest.raises(DataError, match="got a journal of step 0, expected step 2, where the checkpoint is"):
        Journaling.open(configured(tmp_path), HF, NOTHING)


def test_a_journal_with_a_table_that_journals_had_once_opens(tmp_path: Path) -> None:
    async def body() -> tuple[Start, ...]:
        held = Journaling.open(configured(tmp_path), HF, NOTHING)
        starts = (await held.resume(0)).starts
        held.journal.begun(Start(0))
        await held.close()
        return tuple(starts)

    asyncio.run(body())
    with sqlite3.connect(tmp_path / "journal" / "states.sqlite") as connection:
        connection.execute("CREATE TABLE draws (number INTEGER PRIMARY KEY)")
    connection.close()
    assert asyncio.run(body()) == (Start(0),)


def test_changes_of_it_in_redis_are_passed_over() -> None:
    written = pack([Change("drew", (1, "drawn", 0, 0, 0, 0, 0)), Change("fact", ("a", "b")), Change("forgotten draws", (1,))], "place")
    assert unpack(written, "place") == [Change("fact", ("a", "b"))]
