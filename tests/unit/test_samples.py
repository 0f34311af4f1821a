"""Samples: the choice of groups, the records of both sides, and how a reader joins the halves."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import DataError, TrajectoryRejected
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.scoring import Sample, Score
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.telemetry.samples import records
from asyncmoe.telemetry.samples.choice import Choice
from asyncmoe.telemetry.samples.index import GroupSample, index
from asyncmoe.telemetry.samples.records import CLIPPED, NO_WEIGHT, REJECTED, TRAINED
from asyncmoe.telemetry.samples.tokens import Gap, TokenView, tokens_of
from asyncmoe.trainer.objective import Rows, policy_loss, segments
from asyncmoe.trainer.samples import _STATES, _states
from benchmarks.unlogged import Unlogged
from tests.unit.asynchronous import until
from tests.unit.putting import put_group
from tests.unit.sampled_run import SIZE, SampledRun


def only(run_dir: Path) -> GroupSample:
    (entry,) = index(run_dir)
    return entry.load()


def tokens(sample: GroupSample, member: int = 0) -> list[TokenView | Gap]:
    one = sample.group.members[member]
    return tokens_of(sample.group, one, sample.trained.get(one.key))


def responses(sample: GroupSample, member: int = 0) -> list[TokenView]:
    return [one for one in tokens(sample, member) if isinstance(one, TokenView) and one.role == "response"]


def text_of(found: list[TokenView | Gap]) -> str:
    """The text after the prompt."""
    return "".join(f"[{one.count} tokens left out]" if isinstance(one, Gap) else one.piece for one in found if one.role != "prompt")


# ---------------------------------------------------------------- the choice


def test_as_many_groups_of_each_step_are_kept_as_are_wanted_and_not_always_the_same_places() -> None:
    choice = Choice(seed=0, groups=3, of=16)
    blocks = [{n % 16 for n in range(16 * b, 16 * b + 16) if choice.takes(n)} for b in range(20)]
    assert all(len(block) == 3 for block in blocks)
    assert len({frozenset(block) for block in blocks}) > 10
    assert not any(Choice(0, 0, 16).takes(n) for n in range(64))
    assert all(Choice(0, 99, 16).takes(n) for n in range(64))
    assert [Choice(1, 3, 16).takes(n) for n in range(320)] != [choice.takes(n) for n in range(320)]


# ---------------------------------------------------------------- both sides


def test_the_halves_of_a_trajectory_meet_token_by_token(tmp_path: Path) -> None:
    run = SampledRun(tmp_path / "run")
    made = run.group(0, ["19", "20 é 漢"])
    run.train(made, version=4, drift=0.1)
    sample = only(tmp_path / "run")
    assert (sample.entry.outcome, sample.entry.step, sample.entry.reward) == ("trained", 5, 0.5)
    assert (sample.group.question, sample.group.answer) == ("12+7=", "19")
    for i, trajectory in enumerate(made):
        every = [one for one in tokens(sample, i) if isinstance(one, TokenView)]
        assert [one.id for one in every] == trajectory.tokens.tolist()
        assert [one.role == "response" for one in every] == trajectory.loss_mask.tolist()
        assert "".join(one.piece for one in every) == run.tokenizer.decode_all(trajectory.tokens.tolist())
        said = responses(sample, i)
        assert [one.version for one in said] == trajectory.versions[trajectory.loss_mask].tolist()
        np.testing.assert_allclose([one.engine for one in said], trajectory.logprobs[trajectory.loss_mask], atol=1e-5)
        np.testing.assert_allclose([one.trainer for one in said], trajectory.logprobs[trajectory.loss_mask] + 0.1, atol=1e-5)
        assert [one.ratio for one in said] == pytest.approx([math.exp(0.1)] * len(said), abs=1e-4)
        assert {one.advantage for one in said} == {1.0 - 2.0 * i}
        assert sample.group.members[i].reward == trajectory.reward
    assert all(
        one.version is one.engine is one.trainer is None for one in tokens(sample) if isinstance(one, TokenView) and one.role == "prompt"
    )


def test_ranks_have_parts_whose_sum_is_the_whole(tmp_path: Path) -> None:
    """Data-parallel ranks report their rows, tensor-parallel twins none, all add the layers and rows that are theirs."""
    run = SampledRun(tmp_path / "run")
    made = [t for n in range(2) for t in run.group(n, ["19", "a longer one"])]

    def part(indices: list[int], reports: bool) -> torch.Tensor:
        from asyncmoe.queue.group_buffer import describe
        from asyncmoe.trainer.losses import PolicyLoss
        from asyncmoe.trainer.samples import BatchSamples

        collected = BatchSamples([describe(t) for t in made], [0, 1, 2, 3], 4096, reports)
        loss = PolicyLoss(ObjectiveSection(), 1.0, 4, observe=collected.observe)
        run._micro(loss, collected, made, indices, 0.1)
        return collected.values(dict(enumerate(made)))

    whole = part([0, 1, 2, 3], True)
    assert torch.equal(part([0, 3], True) + part([2, 1], True), whole)
    twin = part([0, 1, 2, 3], False)
    assert twin.count_nonzero() < whole.count_nonzero()


def test_long_trajectories_lose_their_middle_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_TOKENS", 7)
    run = SampledRun(tmp_path / "run")
    said = "0123456789abcdefghij"
    made = run.group(0, [said, "19"], run.prompt("1+2+3+4+5+6+7+8=", "36"))
    run.train(made, 4)
    sample = only(tmp_path / "run")
    every = tokens(sample)
    prompt_gap, gap = (one for one in every if isinstance(one, Gap))
    assert (prompt_gap.place, prompt_gap.count) == (4, 16 - 7)
    assert (gap.place, gap.count) == (16 + 4, 21 - 7)
    left = responses(sample)
    assert [one.piece for one in left] == ["0", "1", "2", "3", "i", "j", "<eos>"]
    full = made[0].logprobs[made[0].loss_mask]
    np.testing.assert_allclose([one.engine for one in left], [*full[:4], *full[-3:]], atol=1e-5)
    np.testing.assert_allclose([one.trainer for one in left], np.array([*full[:4], *full[-3:]]) + 0.1, atol=1e-5)
    assert [one.version for one in left] == [3, 3, 3, 3, 4, 4, 4]
    assert [one.place for one in every if isinstance(one, TokenView)] == [*range(4), *range(13, 20), *range(34, 37)]
    assert text_of(every) == "0123[14 tokens left out]ij<eos>"


def test_states_count_as_the_objective_counts() -> None:
    """The letters of single tokens add up to the sums from which the step's figures are computed."""
    draw = torch.Generator().manual_seed(4)
    size = 240
    behaviour = -torch.rand(size, generator=draw)
    new = (behaviour + 0.8 * torch.randn(size, generator=draw)).clamp(max=0).requires_grad_()
    rows = Rows(
        mask=torch.rand(size, generator=draw) < 0.8,
        weights=torch.full((size,), 1 / size),
        advantages=torch.randn(size, generator=draw),
        behaviour=behaviour,
        versions=torch.randint(0, 5, (size,), generator=draw).int(),
        pure=torch.zeros(size, dtype=torch.bool),
        segments=segments([60] * 4, size),
        sequences=4,
        proximal=behaviour + 0.3 * torch.randn(size, generator=draw),
    )
    correction = {"weight": "token", "cap": 1.2, "token_band": (0.6, 1.8), "max_age": 3}
    seen: list[Any] = []
    _, sums = policy_loss(new, rows, ObjectiveSection(correction=correction, updates_per_batch=2), 4, observe=seen.append)  # type: ignore[arg-type]
    letters = [_STATES[state] for state, mine in zip(_states(seen[0]).tolist(), rows.mask.tolist(), strict=True) if mine]
    assert sum(letter not in REJECTED for letter in letters) == int(sums["kept"])
    assert letters.count(CLIPPED) == int(sums["clipped"])
    rejected = dict(zip(("b", "s", "g", "v", "o", "a"), sums["rejected"].int().tolist(), strict=True))
    assert letters.count("b") == rejected["b"] > 0
    assert 0 < letters.count("a") <= rejected["a"]
    assert letters.count(TRAINED) > 0
    assert letters.count(NO_WEIGHT) == 0
    np.testing.assert_array_equal(seen[0].logprobs[rows.mask], new.detach()[rows.mask])


def test_tools_leave_their_calls(tmp_path: Path) -> None:
    run = SampledRun(tmp_path / "run", WithTools(("calculator",), "brackets", chat=False))
    run.group(0, ["[6*7]", "42", "[abacus: 1]", "1"])
    sample = only(tmp_path / "run")
    assert [(call.name, call.argument, call.observation) for call in sample.group.members[0].calls] == [("calculator", "6*7", "42")]
    assert [call.name for call in sample.group.members[1].calls] == ["abacus"]
    roles = [role for role, _ in sample.group.members[0].roles]
    assert roles == ["prompt", "response", "observation", "response"]


# ---------------------------------------------------------------- groups that are not trained


class Wrong(Exact):
    """Cannot score one answer."""

    async def score(self, sample: Sample) -> Score:
        if "bad" in sample.response:
            raise TrajectoryRejected("scorer_error", "ValueError: no \udc80 such answer")
        return Score(1.0)


def produce(run: SampledRun, queue: BoundedQueue, texts: list[str], most: int, **options: Any) -> None:
    class Questions:
        def prompt(self, group: int, stream: str = "prompt") -> Any:
            return run.prompt(f"{group}+0=", str(group))

    async def body() -> None:
        run.pool.texts += texts
        producer = Producer(queue, Questions(), run.worker, SIZE, samples=run.samples, **options)  # type: ignore[arg-type]
        producing = asyncio.create_task(producer.run())
        kept = run.config.run.dir / "samples" / "rollout.jsonl"
        await until(lambda: len(kept.read_bytes().splitlines()) > most or producing.done())
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)

    asyncio.run(body())


def queue_of(run: SampledRun, rule: Any = "drop", **options: Any) -> BoundedQueue:
    made = BoundedQueue(Admission(SIZE, 2, 4, rule), Unlogged(), capacity=8, group_size=SIZE, trained_steps=4, **options)
    made.set_version(4)
    return made


def test_a_rejected_group_leaves_its_responses_and_the_reason(tmp_path: Path) -> None:
    run = SampledRun(tmp_path / "run", scorer=Wrong())
    produce(run, queue_of(run), ["good", "a bad one", *["fine"] * 6], 3)
    found = index(tmp_path / "run")
    first = next(entry for entry in found if entry.group == 0)
    assert (first.outcome, first.reason, first.step) == ("rejected", "scorer_error", None)
    sample = first.load()
    assert "scorer_error: ValueError: no ? such answer" in sample.group.detail
    good, bad = sample.group.members
    assert good.failure in ("", "cancelled")
    assert bad.failure.startswith("scorer_error")
    assert text_of(tokens(sample, 1)) == "a bad one<eos>"
    assert responses(sample, 1)[0].engine == -0.01
    assert bad.reward is None
    assert any(entry.outcome == "queued" for entry in found)


@pytest.mark.parametrize(("rule", "outcome"), [("drop", "dropped"), ("requeue", "requeued")])
def test_stale_groups_say_so(tmp_path: Path, rule: Any, outcome: str) -> None:
    run = SampledRun(tmp_path / "run")

    async def body() -> None:
        queue = queue_of(run, rule=rule, on_stale=run.samples.stale)
        queue.started(SIZE)
        await put_group(queue, made)
        await queue.lease(4, "rl", SIZE, 40, 0.01)

    made = run.group(0, ["19", "18"])
    asyncio.run(body())
    (entry,) = index(tmp_path / "run")
    assert (entry.outcome, entry.reason) == (outcome, "stale")


# ---------------------------------------------------------------- resumes


def test_what_a_resume_undoes_is_said_and_the_same_key_is_not_mistaken(tmp_path: Path) -> None:
    run = SampledRun(tmp_path / "run")
    early, lost = run.group(0, ["19", "18"]), run.group(1, ["one", "two"])
    run.group(2, ["never", "trained"])
    run.train(early, 4)
    run.train(lost, 5)
    run = SampledRun(tmp_path / "run", step=5)
    again = run.group(1, ["other", "words"])
    run.train(again, 5)
    found = index(tmp_path / "run")
    said = [(entry.group, entry.outcome, entry.step, entry.reason) for entry in found]
    assert said == [(0, "trained", 5, ""), (1, "lost", None, ""), (2, "queued", None, ""), (1, "trained", 6, "")]
    assert text_of(tokens(found[3].load())) == "other<eos>"
    assert found[3].load().trained["g1.e0.a0.t0"].step == 6


# ---------------------------------------------------------------- files


def test_only_the_owner_can_read_samples(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        SampledRun(tmp_path / "run").group(0, ["19", "18"])
    finally:
        os.umask(before)
    folder = tmp_path / "run" / "samples"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_full_folder_stops_samples_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", 6000)
    run = SampledRun(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        for n in range(12):
            run.train(run.group(n, ["19", "18"]), 4 + n)
    folder = tmp_path / "run" / "samples"
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert 3000 < size <= 6000
    said = [record.getMessage() for record in caplog.records if "no more groups are kept" in record.getMessage()]
    assert 1 <= len(said) <= 2, "once for each side"
    found = index(tmp_path / "run")
    assert 1 < len(found) < 12
    SampledRun(tmp_path / "run", step=16).group(20, ["19", "18"])
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6000


def test_a_torn_line_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = SampledRun(tmp_path / "run")
    with pytest.raises(DataError, match=r"got none.*telemetry\.samples\.groups"):
        index(tmp_path / "run")
    for number in range(2):
        run.group(number, ["19", "18"])
    path = tmp_path / "run" / "samples" / "rollout.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    (path.parent / "trainer.jsonl").unlink()
    sample = only(tmp_path / "run")
    (one, *_) = responses(sample)
    assert (one.engine, one.trainer, one.ratio, one.state) == (-0.01, None, None, "")
    path.write_bytes(b'\xff\xfe{"record": "what"}\n' + whole)
    with pytest.raises(DataError, match=r"rollout\.jsonl line 1"):
        index(tmp_path / "run")
