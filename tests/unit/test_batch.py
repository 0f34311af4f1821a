"""The schedule's invariants and the rows of a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import InvariantBroken
from asyncmoe.models import family_of
from asyncmoe.models.cost import attention_width, operations
from asyncmoe.trainer.data.batch import MicroBatch, pack
from asyncmoe.trainer.data.schedule import BatchGrid, best_fit_decreasing, cost, schedule, split_updates
from asyncmoe.trajectory import NOT_SAMPLED, Trajectory
from benchmarks.published import REAL
from tests.unit.kept_trajectory import sampled

shapes = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 300), max_size=60),
        "dp": st.integers(1, 6),
        "tokens_per_microbatch": st.integers(8, 400),
        "pack": st.booleans(),
        "grid": st.builds(BatchGrid, tp=st.sampled_from([1, 2, 4, 8]), stages=st.sampled_from([1, 2, 3]), cp=st.sampled_from([1, 1, 2, 3])),
        "width": st.sampled_from([0, 1, 50, 10_000]),
    }
)


def tokens(indices: tuple[int, ...], lengths: list[int]) -> int:
    return sum(lengths[i] for i in indices)


@given(shapes)
def test_schedules_hold_all_once_in_bounds_and_ranks_are_balanced_and_in_lockstep(shape: dict) -> None:
    plan, lengths = schedule(**shape), shape["lengths"]
    every = [i for rank in plan.ranks for microbatch in rank for i in microbatch]
    assert sorted(every) == list(range(len(lengths)))
    assert len(plan.ranks) == shape["dp"]
    (count,) = {len(rank) for rank in plan.ranks}
    assert count >= 1
    assert count % shape["grid"].stages == 0
    padded, multiple = [shape["grid"].of(length) for length in lengths], shape["grid"].rows
    most = max(1, *(tokens(m, padded) for rank in plan.ranks for m in rank))
    assert plan.rows == (0 if shape["grid"].stages == 1 else most + -most % multiple)
    for rank in plan.ranks:
        for microbatch in rank:
            if shape["pack"] and len(microbatch) > 1:
                rows = tokens(microbatch, padded)
                assert rows + -rows % multiple <= shape["tokens_per_microbatch"]
            assert shape["pack"] or len(microbatch) <= 1
    costs = [cost(length, shape["width"]) for length in lengths]
    sizes = [[tokens(m, costs) for m in rank] for rank in plan.ranks]
    assert max(map(sum, sizes)) - min(map(sum, sizes)) <= max(max(s) for s in sizes)
    for before, after in zip(zip(*sizes, strict=True), list(zip(*sizes, strict=True))[1:], strict=False):
        assert min(before) >= max(after)  # whatever waits for the m-th of another rank waits for one of like size


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 40))
def test_best_fit_is_that_of_the_definition(lengths: list[int], bound: int) -> None:
    """Johnson, "Near-optimal bin packing algorithms" (1973): each item, largest first, into the fullest bin with room."""
    bins: list[list[int]] = []

    def held(one: list[int]) -> int:
        return sum(lengths[i] for i in one)

    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = max((one for one in bins if held(one) + lengths[index] <= bound), key=held, default=None)
        bins.append([index]) if room is None else room.append(index)
    assert [sorted(one) for one in bins] == [list(one) for one in best_fit_decreasing(lengths, bound)]


def test_a_long_trajectory_costs_more_than_its_tokens() -> None:
    """Two ranks of 24 tokens each by tokens alone; by cost the one of 16 has less beside it."""
    lengths = [16, *[4] * 8]
    even = schedule(lengths, 2, 1000, True, BatchGrid())
    assert sorted(tokens(rank[0], lengths) for rank in even.ranks) == [24, 24]
    found = schedule(lengths, 2, 1000, True, BatchGrid(), width=8)
    assert sorted(tokens(rank[0], lengths) for rank in found.ranks) == [16, 32]
    assert [cost(16, 8), 8 * cost(4, 8)] == [384, 384]


def test_the_width_of_a_real_model() -> None:
    """Qwen3-30B-A3B: of its 3.3 billion active parameters the embedding is looked up; 48 layers of 32 heads of 128."""
    shape = family_of(REAL["Qwen3-30B-A3B"]).shape_of(REAL["Qwen3-30B-A3B"])
    active = 3.345e9 - 151936 * 2048
    assert attention_width(shape) == pytest.approx(active / (48 * 32 * 128), rel=0.01)
    latent = family_of(REAL["DeepSeek-V3"]).shape_of(REAL["DeepSeek-V3"])
    assert attention_width(latent) == pytest.approx(2 * (37.5e9 - 129280 * 7168) / (61 * 128 * (192 + 128)), rel=0.02)
    width, token = attention_width(shape), 2 * active
    assert operations(shape, [width, width]) == pytest.approx(2 * width * 2 * token, rel=0.01)
    assert operations(shape, [1] * 100) == pytest.approx(100 * token, rel=0.01)


def test_updates_take_whole_groups_in_order() -> None:
    assert split_updates([7, 7, 3, 3, 9, 9, 1, 1], 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert split_updates([5, 6, 5, 6], 2) == [[0, 2], [1, 3]]
    with pytest.raises(InvariantBroken):
        split_updates([1, 1], 2)


def trajectory(length: int, prompt: int, seed: int, version: int = 3, pure: bool = True) -> Trajectory:
    made = random_trajectory(seed, np.arange(length) >= prompt, np.full(length, version), 1.0, np.random.default_rng(seed))
    return made if pure else replace(made, prefix_version=NOT_SAMPLED)


def random_trajectory(number: int, mask: np.ndarray, version: np.ndarray, scale: float, random: np.random.Generator) -> Trajectory:
    """Random tokens and log-probabilities, for a mask and the version of each token [T]."""
    tokens, logprobs = random.integers(1, 90, len(mask)), -scale * random.random(len(mask))
    return sampled(tokens, mask, logprobs, version, episode=number, prefix_version=int(version.max()))


Case = tuple[dict[int, Trajectory], list[int], int, bool]
"""Trajectories by index, the indices of a micro-batch, what its rows are a multiple of, and whether it is packed."""


@st.composite
def batches(draw: st.DrawFn) -> Case:
    packed = draw(st.booleans())
    lengths = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=6 if packed else 1))
    known = {10 + i: trajectory(prompt + sampled, prompt, i, pure=i % 2 == 0) for i, (prompt, sampled) in enumerate(lengths)}
    return known, draw(st.permutations(list(known))), draw(st.sampled_from([1, 2, 4, 8])), packed


def made(case: Case) -> MicroBatch:
    known, indices, multiple, packed = case
    count = 10 + len(known)
    both = {"advantages": np.arange(count) + 1.0, "weights": np.arange(count) / 7 + 1}
    proximal = {i: i + np.arange(len(t), dtype=np.float32) for i, t in known.items()}
    return pack(known, indices, **both, grid=BatchGrid(multiple), packed=packed, proximal=proximal)


@given(batches())
def test_every_sampled_token_is_the_target_of_the_row_before_it_and_nothing_else_counts(case: Case) -> None:
    known, indices, multiple, packed = case
    batch = made(case)
    for index, first, count in batch.places:
        t = known[index]
        rows, last = slice(first, first + count), first + count - 1
        assert torch.equal(batch.tokens[0, rows], torch.from_numpy(t.tokens).long())
        assert batch.positions[0, rows].tolist() == list(range(count))
        assert torch.equal(batch.targets[first:last], torch.from_numpy(t.tokens[1:]).long())
        assert batch.mask[first:last].tolist() == t.loss_mask[1:].tolist()
        assert batch.behaviour[first:last].tolist() == t.logprobs[1:].tolist()
        assert batch.versions[first:last].tolist() == t.versions[1:].tolist()
        assert batch.pure[first:last].tolist() == (t.loss_mask[1:] & t.is_pure).tolist()
        assert batch.proximal[first:last][batch.mask[first:last]].tolist() == [index + n for n in range(1, len(t)) if t.loss_mask[n]]
        assert set(batch.advantages[rows][batch.mask[rows]].tolist()) == {index + 1.0}
        assert not batch.mask[last]
    assert [place[0] for place in batch.places] == list(indices)
    assert int(batch.mask.sum()) == sum(int(known[index].loss_mask.sum()) for index in indices)
    for name in ("behaviour", "proximal", "advantages", "weights"):
        assert (getattr(batch, name)[~batch.mask] == 0).all()
        assert getattr(batch, name).dtype == torch.float32
    assert (batch.versions[~batch.mask] == NOT_SAMPLED).all()
    assert not batch.pure[~batch.mask].any()
    assert (batch.weights[batch.mask] > 0).all()
    real = sum(len(known[i]) for i in indices)
    assert batch.rows % multiple == 0
    assert batch.rows == multiple if not indices else batch.rows - real < multiple
    assert (batch.cu_seqlens is None) == (not packed)
    if batch.cu_seqlens is not None:
        bounds = batch.cu_seqlens.tolist()
        assert (bounds[0], bounds[-1]) == (0, batch.rows)
        assert bounds == sorted(set(bounds))
        assert [bound for bound in bounds[:-1] if bound < real] == [place[1] for place in batch.places]
        assert batch.max_seqlen == max(b - a for a, b in pairwise(bounds))


@given(batches(), st.sampled_from([2, 3, 4]))
def test_context_parallel_ranks_hold_every_token_once_with_all_that_belongs_to_it(case: Case, cp: int) -> None:
    known, indices, tp, packed = case
    count = 10 + len(known)
    both = {"advantages": np.arange(count) + 1.0, "weights": np.arange(count) / 7 + 1}
    whole = pack(known, indices, **both, grid=BatchGrid(), packed=True)
    seen = np.zeros(whole.rows, np.int64)
    for rank in range(cp):
        part = pack(known, indices, **both, grid=BatchGrid(tp, cp=cp), packed=packed, cp_rank=rank)
        assert part.rows % tp == 0
        assert part.rows * cp == part.whole
        assert [index for index, _, _ in part.places] == indices
        real = part.segments >= 0
        firsts = torch.tensor([first for _, first, _ in whole.places] or [0])
        at = firsts[part.segments[real]] + part.positions[0, real]
        seen[at] += 1
        assert torch.equal(part.tokens[:, real], whole.tokens[:, at])
        for name in ("targets", "mask", "behaviour", "versions", "pure", "advantages", "weights", "segments"):
            assert torch.equal(getattr(part, name)[real], getattr(whole, name)[at])
        assert not part.mask[~real].any()
        starts = torch.tensor([first for _, first, _ in part.places] or [0])
        assert torch.equal(part.held[real], starts[part.segments[real]] + part.positions[0, real])
        assert part.everywhere(part.mask.float()).sum() == part.mask.sum()
    assert (seen == (whole.segments >= 0).numpy()).all()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("indices", [[], [0]])
def test_rows_can_be_more_than_are_needed(packed: bool, indices: list[int]) -> None:
    known = {0: trajectory(6, 2, 0)}
    batch = pack(known, indices, advantages=[1.0], weights=[1.0], grid=BatchGrid(4), packed=packed, rows=16)
    assert batch.rows == 16
    assert int(batch.mask.sum()) == 4 * len(indices)
    assert batch.cu_seqlens is None or batch.cu_seqlens.tolist() == [0, *([6] if indices else []), 16]
    assert batch.max_seqlen == (10 if packed and indices else 16)


def test_advantages_of_single_tokens_follow_the_targets() -> None:
    both = {4: trajectory(6, 2, 0), 9: trajectory(3, 1, 1)}
    each = {i: (i + np.arange(len(t), dtype=np.float32)) for i, t in both.items()}
    batch = pack(both, [9, 4], advantages=each, weights=[1.0] * 10, grid=BatchGrid(4), packed=True)
    assert batch.advantages.tolist() == [10.0, 11.0, 0.0, 0.0, 6.0, 7.0, 8.0, 9.0, 0.0, 0.0, 0.0, 0.0]


def test_a_sampled_first_token_is_refused() -> None:
    with pytest.raises(InvariantBroken, match="nothing precedes it"):
        pack({0: trajectory(4, 0, 0)}, [0], advantages=[1.0], weights=[1.0], grid=BatchGrid(1), packed=True)
