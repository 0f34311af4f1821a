"""Whatever is summed over the rows of a step, from whole trajectories, against a loop over their tokens in float64: micro-batches of any
layout, with padding, filler, prompts, masked turns and responses of which nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.config.objective import Aggregation, ObjectiveSection
from asyncmoe.trainer import objective
from asyncmoe.trainer.data.batch import pack
from asyncmoe.trainer.data.schedule import BatchGrid, schedule
from asyncmoe.trainer.losses import PolicyLoss, SupervisedLoss
from asyncmoe.trajectory import Trajectory
from tests.unit.example_counts import examples
from tests.unit.test_batch import random_trajectory

VERSION, CAP, MAX_AGE, COEFFICIENT = 6, 1.5, 1, 0.3


@dataclass(frozen=True)
class Step:
    """Trajectories with a weight, an advantage, and log-probabilities [T] each of the trainer and a reference."""

    known: dict[int, Trajectory]
    weights: np.ndarray
    advantages: np.ndarray
    new: dict[int, np.ndarray]
    reference: dict[int, np.ndarray]
    aggregation: Aggregation


@st.composite
def steps(draw: st.DrawFn) -> Step:
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    lengths = draw(st.lists(st.integers(1, 25), max_size=8))
    aggregation = draw(st.sampled_from(["token_mean", "sequence_mean"]))
    known = {i: trajectory(i, length, random) for i, length in enumerate(lengths)}
    sampled = [int(t.loss_mask.sum()) for t in known.values()]
    planned = objective.token_weights(sampled, aggregation) * random.choice([1.0, 0.5], len(known))
    new, reference = ({i: -3 * random.random(len(t)).astype(np.float32) for i, t in known.items()} for _ in range(2))
    return Step(known, planned.astype(np.float32), random.normal(size=len(known)).astype(np.float32), new, reference, aggregation)


def trajectory(number: int, length: int, random: np.random.Generator) -> Trajectory:
    """Any of its tokens but the first may be sampled: one version's, or of several."""
    mask = (random.random(length) < random.choice([0.0, 0.5, 0.9])) & (np.arange(length) > 0)
    version = random.integers(VERSION - 3, VERSION + 1, length) if random.random() < 0.5 else np.full(length, VERSION)
    return replace(random_trajectory(number, mask, version, 3.0, random), prefix_version=VERSION)


def summed(at: Step, loss: PolicyLoss | SupervisedLoss, dp: int, grid: BatchGrid, packed: bool) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the sums as `step._reduce` makes them, of all micro-batches of all ranks. Log-probabilities of other rows are NaN."""
    planned = schedule([len(t) for t in at.known.values()], dp, 40, packed, grid)
    value, sums = 0.0, {name: np.full(shape, -1.0 if name.startswith("max_") else 0.0) for name, shape in loss.sums.items()}
    for indices in (indices for rank in planned.ranks for indices in rank):
        for cp_rank in range(grid.cp):
            arguments = {"advantages": at.advantages, "weights": at.weights, "reference": at.reference}
            batch = pack(at.known, indices, **arguments, grid=grid, packed=packed, rows=planned.rows, cp_rank=cp_rank)  # type: ignore[arg-type]
            logprobs = np.full(batch.whole, np.nan, np.float32)
            for index, first, count in batch.places:
                logprobs[first : first + count - 1] = np.where(at.known[index].loss_mask, at.new[index], np.nan)[1:]
            rows = torch.from_numpy(logprobs)
            part, found = loss(rows if batch.held is None else rows[batch.held], batch, None)
            value += float(part)
            for name, one in found.items():
                sums[name] = np.maximum(sums[name], one.numpy()) if name.startswith("max_") else sums[name] + one.numpy()
    return value * objective.scale(sums), sums


def tokens(at: Step) -> Iterator[tuple[int, float, float, float, int]]:
    """(trajectory, log pi, log pi of the engine, of the reference, age) of each sampled token."""
    for i, t in at.known.items():
        for place in np.flatnonzero(t.loss_mask):
            yield i, *(float(v[place]) for v in (at.new[i], t.logprobs, at.reference[i])), VERSION - int(t.versions[place])


@settings(max_examples=examples(150), deadline=None)
@given(steps(), st.integers(1, 3), st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (4, 2, 1), (1, 1, 2), (2, 2, 4)]), st.booleans())
def test_sums_over_rows_are_those_of_a_loop_over_tokens(at: Step, dp: int, sizes: tuple[int, int, int], packed: bool) -> None:
    grid = BatchGrid(*sizes)
    changes = {"correction": {"cap": CAP, "max_age": MAX_AGE}, "kl": {"coefficient": COEFFICIENT, "estimator": "k3"}}
    section = ObjectiveSection.model_validate({"aggregation": at.aggregation, **changes})
    every = list(tokens(at))
    kept = [one for one in every if one[-1] <= MAX_AGE]
    counted = {i: sum(one[0] == i for one in every) for i in at.known}
    left = {i: sum(one[0] == i for one in kept) for i in at.known}

    supervised, sums = summed(at, SupervisedLoss(), dp, grid, packed)
    assert supervised == pytest.approx(-sum(float(at.weights[i]) * new for i, new, *_ in every), rel=1e-5, abs=1e-6)
    assert int(sums["tokens"]) == len(every)

    if grid.cp > 1 and at.aggregation == "sequence_mean":
        return  # there context-parallel ranks add up over each other: tests/ranks

    def weight(i: int) -> float:
        return float(at.weights[i]) * (counted[i] / left[i] if at.aggregation == "sequence_mean" else 1.0)

    def term(i: int, new: float, engine: float, reference: float) -> float:
        return -float(at.advantages[i]) * min(math.exp(new - engine), CAP) + COEFFICIENT * k3(reference - new)

    whole, rest = sum(float(at.weights[i]) for i, *_ in every), sum(weight(i) for i, *_ in kept)
    wanted = sum(weight(i) * term(i, *values) for i, *values, _ in kept) * whole / (rest or 1.0)
    loss = PolicyLoss(section, 1.0, VERSION)
    value, sums = summed(at, loss, dp, grid, packed)
    assert value == pytest.approx(wanted, rel=1e-4, abs=1e-5)

    said, count = loss.figures(sums), max(len(every), 1)
    ratios = [math.exp(new - engine) for _, new, engine, *_ in every]
    pure = [abs(new - engine) for i, new, engine, *_ in every if at.known[i].is_pure]
    figures = {
        "sampled_tokens": len(every),
        "rejected_fraction": (len(every) - len(kept)) / count,
        "tis_capped_fraction": sum(ratio > CAP for ratio in ratios) / count,
        "correction_mean": sum(min(math.exp(new - engine), CAP) for _, new, engine, *_ in kept) / max(len(kept), 1),
        "ratio_mean": sum(ratios) / count,
        "ess": sum(ratios) ** 2 / (count * sum(ratio**2 for ratio in ratios)) if ratios else 0.0,
        "train_infer_kl": sum(k3(new - engine) for _, new, engine, *_ in every) / count,
        "train_infer_kl_direct": sum(engine - new for _, new, engine, *_ in every) / count,
        "kl_reference": sum(k3(reference - new) for _, new, _, reference, _ in every) / count,
        "logprob_diff_mean": sum(abs(new - engine) for _, new, engine, *_ in every) / count,
        "logprob_tokens_same_version": len(pure),
        "logprob_diff_max_same_version": max(pure, default=0.0),
    }
    assert {name: said[name] or 0.0 for name in figures} == pytest.approx(figures, rel=1e-4, abs=1e-6)
    assert said["ages"] == {age: n for age in range(4) if (n := sum(one[-1] == age for one in every))}


def k3(log_ratio: float) -> float:
    return math.expm1(log_ratio) - log_ratio
