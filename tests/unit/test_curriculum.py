"""Prompts by measured difficulty: the draws follow from seed and results, none is forgotten, a resume changes nothing, and it helps."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe import checkpoints
from asyncmoe.config import parse
from asyncmoe.config.curriculum import CurriculumSection
from asyncmoe.errors import AsyncmoeError, ConfigError, DataError, InvariantBroken, ProtocolError, TrajectoryRejected
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout import tasks
from asyncmoe.rollout.controller import Controller
from asyncmoe.rollout.engines.types import Generation, VersionSpan
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.rollout.journaling import Journaling
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.tasks import Curriculum, Example, Prompt, curriculum_file
from asyncmoe.rollout.tasks.curriculum import chance
from asyncmoe.rollout.tasks.order import EVALUATION, ListedTask, MixedTask
from asyncmoe.rpc.messages import Done
from asyncmoe.trajectory import Recording, Trajectory
from tests.unit import openai_policy
from tests.unit.example_counts import examples

GROUP = 8


class Plain:
    """An encoder that needs no tokenizer."""

    def prompt(self, example: Example, where: str) -> Prompt:
        return Prompt(str(example.prompt), (1, 2), example.answer)


def listed(size: int, seed: int = 0, name: str = "q", **more: Any) -> ListedTask:
    return ListedTask([Example(f"{name}{index}", str(index)) for index in range(size)], Plain(), seed, name, **more)  # type: ignore[arg-type]


def curriculum(size: int = 40, seed: int = 0, **section: Any) -> Curriculum:
    return Curriculum(listed(size, seed), CurriculumSection(enabled=True, **section), seed)


def asked(drawn: Curriculum, group: int) -> str:
    drawn.draw(group)
    return drawn.prompt(group).text


# ---------------------------------------------------------------- what follows from seed and results

results = st.lists(st.tuples(st.integers(0, GROUP), st.integers(0, 5), st.booleans()), min_size=1, max_size=120)
"""Of each group: how many responses pass, how many groups are drawn before it ends, and whether it is rejected."""


def play(drawn: Curriculum, first: int, fates: Sequence[tuple[int, int, bool]]) -> list[str]:
    """Draw groups and end the oldest open one, as told; return the questions in the order of the draws."""
    texts, number = [], first
    for passed, ahead, rejected in fates:
        for _ in range(ahead):
            texts.append(asked(drawn, number))
            number += 1
        if drawn.open:
            group = drawn.open[0]
            if not rejected:
                drawn.measured(group, [1.0] * passed + [0.0] * (GROUP - passed))
            drawn.closed(group)
    return texts


@settings(max_examples=examples(40))
@given(fates=results, seed=st.integers(0, 9))
def test_the_same_seed_and_results_give_the_same_draws(fates: list[tuple[int, int, bool]], seed: int) -> None:
    assert play(curriculum(seed=seed), 0, fates) == play(curriculum(seed=seed), 0, fates)


@settings(max_examples=examples(40))
@given(fates=results, cut=st.integers(0, 120), mixed=st.booleans())
def test_a_resumed_run_draws_as_an_uninterrupted_one(fates: list[tuple[int, int, bool]], cut: int, mixed: bool) -> None:
    def made() -> Curriculum:
        task = MixedTask([listed(20, name="a"), listed(7, name="b", part=" 1")], [3, 1], 0) if mixed else listed(25)
        return Curriculum(task, CurriculumSection(enabled=True), 0)

    whole = made()
    before = play(whole, 0, fates[:cut])
    state = whole.state()
    resumed = made()
    resumed.restore(state)
    assert [resumed.prompt(group).text for group in resumed.open] == [whole.prompt(group).text for group in whole.open]
    assert play(resumed, len(before), fates[cut:]) == play(whole, len(before), fates[cut:])
    assert resumed.figures().by_passed == whole.figures().by_passed
    assert resumed.figures().difficulty == pytest.approx(whole.figures().difficulty)


def test_a_state_is_a_copy_and_a_file_of_it_reads_as_it_was(tmp_path: Path) -> None:
    drawn = curriculum()
    play(drawn, 0, [(number % 9, 2, number % 5 == 0) for number in range(60)])
    state = drawn.state()
    curriculum_file.write(state, tmp_path)
    counts = state.parts[0].counts.copy()
    drawn.measured(drawn.open[0], [1.0] * GROUP)
    found = curriculum_file.read(tmp_path, drawn.sources, drawn.sizes)
    assert found is not None
    assert (found.next, found.open, found.sources) == (state.next, state.open, state.sources)
    assert (found.parts[0].turn, found.parts[0].passed_over) == (state.parts[0].turn, state.parts[0].passed_over)
    np.testing.assert_array_equal(found.parts[0].counts, counts)
    np.testing.assert_array_equal(found.parts[0].last, state.parts[0].last)


@given(passed=st.floats(0, 1e6), failed=st.floats(0, 1e6), floor=st.floats(0.001, 1))
def test_every_prompt_keeps_the_floor(passed: float, failed: float, floor: float) -> None:
    assert floor <= chance(passed, failed, floor) <= 1 + 1e-12


def test_the_chance_is_the_variance_of_success() -> None:
    assert chance(0, 0, 0.1) == 1
    assert chance(7, 7, 0.1) == 1
    assert (chance(8, 0, 0.0), chance(0, 8, 0.0)) == pytest.approx((0.36, 0.36))
    assert chance(1e9, 0, 0.1) == pytest.approx(0.1)


def test_prompts_that_always_pass_come_back_as_often_as_the_floor_says() -> None:
    drawn, taken = curriculum(30, floor=0.2, memory=1.0), Counter[str]()
    for group in range(3000):
        text = asked(drawn, group)
        taken[text] += group >= 1000
        drawn.measured(group, [1.0] * GROUP)
        drawn.closed(group)
    assert len(+taken) == 30
    turns = group + 1 + drawn.figures().passed_over
    assert group / turns == pytest.approx(0.2, abs=0.05)


def test_the_first_epoch_is_that_of_the_task_and_nothing_else_changes() -> None:
    task = listed(30, trained=range(10, 30), held=[Example("held", "")])
    drawn = Curriculum(task, CurriculumSection(enabled=True), 0)
    assert [asked(drawn, group) for group in range(20)] == [task.prompt(group).text for group in range(20)]
    for group in range(20):
        drawn.measured(group, [0.0] * GROUP)
        drawn.closed(group)
    later = {asked(drawn, group) for group in range(20, 400)}
    assert later == {f"q{index}" for index in range(10, 30)}
    assert drawn.prompt(3, EVALUATION) == task.prompt(3, EVALUATION) == Prompt("held", (1, 2), "")
    assert [gold.answer for gold in drawn.golds()] == [gold.answer for gold in task.golds()]


def test_a_mixture_keeps_its_weights() -> None:
    task = MixedTask([listed(50, name="easy"), listed(50, name="open", part=" 1")], [3, 1], 0)
    drawn, taken = Curriculum(task, CurriculumSection(enabled=True), 0), Counter[str]()
    for group in range(2000):
        text = asked(drawn, group)
        taken[text.rstrip("0123456789")] += 1
        drawn.measured(group, [1.0] * GROUP if text.startswith("easy") else [1.0, 0.0] * 4)
        drawn.closed(group)
    assert taken["easy"] / 2000 == pytest.approx(0.75, abs=0.03)
    assert drawn.figures().passed_over > 2000


def test_informative_groups_become_more() -> None:
    """Half of the prompts always pass, 30 % never; the 20 % between are what a step learns from."""

    def share(floor: float) -> float:
        rates = [1.0] * 50 + [0.0] * 30 + [0.5] * 20
        drawn, random, informative = curriculum(100, floor=floor), Random(1), 0
        for group in range(1500):
            rate = rates[int(asked(drawn, group)[1:])]
            rewards = [float(random.random() < rate) for _ in range(GROUP)]
            drawn.measured(group, rewards)
            drawn.closed(group)
            informative += group >= 500 and len(set(rewards)) > 1
        figures = drawn.figures()
        assert figures.measured == 100
        assert figures.by_passed == pytest.approx({"none": 0.3, "some": 0.2, "all": 0.5}, abs=0.01)
        assert figures.difficulty == pytest.approx(0.4, abs=0.03)
        return informative / 1000

    assert share(1.0) == pytest.approx(0.2, abs=0.03)
    assert share(0.1) == pytest.approx(0.53, abs=0.04)  # as docs/guides/task.md says


class Million:
    """A source whose examples are made when they are asked for."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Example:
        return Example(f"q{index}", "")


def test_a_million_prompts_take_nine_bytes_each() -> None:
    drawn = Curriculum(ListedTask(Million(), Plain(), 0, "many"), CurriculumSection(enabled=True), 0)  # type: ignore[arg-type]
    state = drawn.state()
    assert state.parts[0].counts.nbytes + state.parts[0].last.nbytes == 9_000_000


def test_a_group_that_ended_is_not_drawn_again() -> None:
    drawn = curriculum()
    drawn.draw(0)
    drawn.draw(0)
    drawn.closed(0)
    with pytest.raises(InvariantBroken, match="group 0 is drawn again, the next one is 1"):
        drawn.draw(0)


# ---------------------------------------------------------------- what is refused

GOOD: dict[str, Any] = {"run": {"dir": "run", "steps": 1}, "model": {"path": "model"}, "scoring": {"scorer": "exact"}}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"kind": "arithmetic"}, "task.curriculum.enabled: got true, expected false because arithmetic draws new questions"),
        ({"kind": "dataset", "path": "a", "streaming": True}, "expected false because a stream has no known prompts"),
        ({"kind": "dataset", "sources": [{"path": "a"}, {"path": "b", "streaming": True}]}, "because a stream has no known prompts"),
        ({"kind": "jsonl", "path": "a", "curriculum": {"enabled": True, "floor": 0}}, "task.curriculum.floor: got 0"),
        ({"kind": "jsonl", "path": "a", "curriculum": {"enabled": True, "memory": 1.5}}, "task.curriculum.memory: got 1.5"),
    ],
)
def test_what_cannot_be_measured_is_refused(task: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**GOOD, "task": {"curriculum": {"enabled": True}, **task}})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_without_end_is_refused_and_a_file_is_not(tmp_path: Path) -> None:
    known = openai_policy.tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"^task\.curriculum\.enabled: got a source without end, expected sources of known length"):
        tasks.load(parse({**GOOD, "task": {"kind": "tests.unit.task_sources:Doubles", "curriculum": {"enabled": True}}}), known)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"question": f"q{n}", "answer": n}) + "\n" for n in range(20)))
    rows = {"kind": "jsonl", "path": str(tmp_path / "d.jsonl"), "curriculum": {"enabled": True}}
    loaded = tasks.load(parse({**GOOD, "task": rows, "evaluation": {"every": 1, "prompts": 4}}), known)
    assert isinstance(loaded.training, Curriculum)
    assert not isinstance(loaded.sets[0].task, Curriculum) or loaded.sets[0].task is loaded.training
    held = {loaded.sets[0].task.prompt(n, EVALUATION).text for n in range(4)}
    for group in range(100):
        loaded.training.draw(group)
        loaded.training.measured(group, [0.0])
        assert loaded.training.prompt(group).text not in held


def saved(tmp_path: Path, drawn: Curriculum, step: int = 3) -> Path:
    checkpoints.start(tmp_path, step)
    curriculum_file.write(drawn.state(), checkpoints.temporary(tmp_path, step))
    return checkpoints.finish(tmp_path, step, {"step": step}, keep=2)


def test_a_run_resumes_from_its_newest_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawn, again = curriculum(), curriculum()
    curriculum_file.resume(again, tmp_path)
    assert (again.open, again.first(4)) == ([], 4)
    play(drawn, 0, [(3, 3, False)] * 10)
    path = saved(tmp_path, drawn)
    curriculum_file.resume(again, tmp_path)
    assert (again.open, again.first(4)) == (drawn.open, 30)
    (path / curriculum_file.FILE).unlink()
    with caplog.at_level(logging.WARNING):
        curriculum_file.resume(curriculum(), tmp_path)
    assert [record.message for record in caplog.records] == [
        "step-00000003 was written without task.curriculum: the difficulty of prompts is measured from now on"
    ]


def test_the_controller_follows_a_trainer_that_fell_back(tmp_path: Path) -> None:
    """The trainer's ranks find damage that no process found before engines started."""
    drawn, again = curriculum(), curriculum()
    play(drawn, 0, [(3, 3, False)] * 10)
    older = saved(tmp_path, drawn)
    wanted = drawn.first(4)
    play(drawn, 30, [(3, 3, False)] * 10)
    saved(tmp_path, drawn, step=4)
    curriculum_file.resume(again, tmp_path)
    assert again.first(4) == drawn.first(4) != wanted
    curriculum_file.follow(again, tmp_path, 3)
    assert again.first(4) == wanted
    curriculum_file.follow(again, tmp_path, 0)
    assert again.first(4) == wanted, "a run without checkpoint has nothing to follow"
    (older / curriculum_file.FILE).unlink()
    with pytest.raises(
        AsyncmoeError, match=r"the trainer resumed from step-00000003, which has no curriculum\.npz; start the same command"
    ):
        curriculum_file.follow(again, tmp_path, 3)
    curriculum_file.follow(curriculum(), tmp_path, 3)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _pickled(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, told=np.array([{"a": 1}], dtype=object))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut, r"curriculum\.npz: got BadZipFile: .*expected a file that this run wrote"),
        (lambda path: path.write_bytes(b""), r"curriculum\.npz: got EOFError"),
        (lambda path: path.write_text("no arrays"), r"curriculum\.npz: got ValueError"),
        (_pickled, r"curriculum\.npz: got ValueError: Object arrays cannot be loaded"),
        (lambda path: path.write_bytes(bytes(80 << 20)), r"curriculum\.npz: got \d+ bytes, expected the state of 40 prompts"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    path = saved(tmp_path, curriculum()) / curriculum_file.FILE
    damage(path)
    with pytest.raises(DataError, match=rf"^step-00000003/{said}") as caught:
        curriculum_file.resume(curriculum(), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", [curriculum(41), curriculum(seed=1), Curriculum(listed(40, name="other"), CurriculumSection(), 0)])
def test_the_difficulty_of_other_prompts_is_refused(tmp_path: Path, other: Curriculum) -> None:
    saved(tmp_path, curriculum())
    with pytest.raises(DataError, match=r"got the difficulty of other prompts, expected that of the task's; .* delete .* anew"):
        curriculum_file.resume(other, tmp_path)


def test_the_controller_writes_its_part_before_the_checkpoint_is_whole(tmp_path: Path) -> None:
    drawn = curriculum()
    drawn.draw(0)
    checkpoints.start(tmp_path, 7)
    config: Any = SimpleNamespace(run=SimpleNamespace(dir=tmp_path))
    served = SimpleNamespace(_curriculum=drawn, _config=config, _journaling=Journaling(config, None, drawn))
    assert asyncio.run(Controller._save(served, 7)) == Done()  # type: ignore[arg-type]
    assert checkpoints.newest(tmp_path) is None
    path = checkpoints.finish(tmp_path, 7, {"step": 7}, keep=1)
    found = curriculum_file.read(path, drawn.sources, drawn.sizes)
    assert found is not None
    assert [group for group, _, _ in found.open] == [0]
    served._curriculum = None
    with pytest.raises(ProtocolError, match=r"step 7 has no part of the controller, because task\.curriculum is off"):
        asyncio.run(Controller._save(served, 7))  # type: ignore[arg-type]


# ---------------------------------------------------------------- the producer


def test_the_producer_tells_what_its_groups_scored_and_starts_open_ones_first() -> None:
    """Group 2 is rejected, group 3 has equal rewards, and after a resume what was queued is asked again."""
    drawn, started = curriculum(), list[tuple[int, str]]()
    size, batch = 2, 8

    async def episode(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
        started.append((place.group, prompt.text))
        if place.group == 2:
            raise TrajectoryRejected("scorer_nan", "no score")
        turn = Turn(prompt.tokens, Generation.of((7, 2), (-0.5, -0.25), (VersionSpan("0", 0, 2),), "stop", 0), 0)
        reward = 1.0 if place.group == 3 else float(place.episode)
        return (assemble([turn], place, Recording(), reward, {}),)

    async def run(drawn: Curriculum, trained: int) -> None:
        def trained_on(groups: Sequence[Group]) -> None:
            for group in groups:
                drawn.closed(group.number)

        held = BoundedQueue(capacity=batch, batch=batch, group_size=size, max_staleness=0, on_trained=trained_on)
        producing = asyncio.create_task(Producer(held, drawn, episode, size, filter_equal=True).run())
        async with asyncio.timeout(10):
            while held.stats().depth < batch:
                await asyncio.sleep(0.001)
        for step in range(trained):
            await held.lease(step, "rl", batch, step, 1.0)
            held.commit(step)
        producing.cancel()
        await asyncio.wait({producing})

    asyncio.run(run(drawn, 0))
    assert drawn.open == [0, 1, 4, 5]
    assert drawn.figures().by_passed == {"none": 0.0, "some": 0.8, "all": 0.2}
    resumed, texts = curriculum(), dict(started)
    resumed.restore(drawn.state())
    started.clear()
    asyncio.run(run(resumed, 1))
    assert dict(started) == {group: texts[group] for group in (0, 1, 4, 5)}
    assert resumed.open == []
    assert resumed.first(0) == 6
