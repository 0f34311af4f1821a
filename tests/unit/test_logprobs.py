"""Log-probabilities of sampled tokens over their supports, from hidden rows, against torch's log_softmax and autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.models import head_blocks
from asyncmoe.trainer.data.replay_data import Support
from asyncmoe.trainer.model.logprobs import target_logprobs
from benchmarks.live_tensors import LiveTensors

HIDDEN = 16


def blocks_of(ids: int) -> AbstractContextManager[object]:
    return mock.patch.object(head_blocks, "width", lambda rows, vocabulary, cpu: min(vocabulary, ids))


def layer(rows: int, vocabulary: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows and a weight whose logits are about as far apart as a model's."""
    torch.manual_seed(seed)
    return torch.randn(rows, HIDDEN).requires_grad_(), (torch.randn(vocabulary, HIDDEN) * 1.5).requires_grad_()


def test_without_rows_nothing_is_computed_and_gradients_are_zero() -> None:
    hidden, weight = layer(0, 37)
    got = target_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0, None, supports(torch.zeros(0, 37, dtype=torch.bool)))
    assert got.entropy is None
    (got.sampled.sum() + got.whole.sum()).backward()
    assert hidden.grad.shape == (0, HIDDEN)
    assert not weight.grad.any()


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_has_no_gradient(frozen: int) -> None:
    given = layer(4, 37)
    given[frozen].requires_grad_(False)
    target_logprobs(*given, torch.arange(4), 1.0, None).sampled.sum().backward()
    assert given[frozen].grad is None
    assert given[1 - frozen].grad is not None


def test_logits_of_a_bfloat16_model_are_rounded_and_normalised_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (8, 4096))
    targets = torch.randint(0, 4096, (8,))
    with blocks_of(1000):
        got = target_logprobs(hidden, weight, targets, 0.8, None)
        got.sampled.sum().backward()
    logits = (hidden.detach() @ weight.detach().t()).float().requires_grad_()
    expected = torch.log_softmax(logits / 0.8, dim=1).gather(1, targets[:, None]).squeeze(1)
    assert got.sampled.dtype == torch.float32
    torch.testing.assert_close(got.sampled, expected, atol=1e-5, rtol=1e-5)
    (of_logits,) = torch.autograd.grad(expected.sum(), logits)
    for found, wanted in ((hidden, of_logits @ weight.float()), (weight, of_logits.t() @ hidden.float())):
        assert found.grad.dtype == torch.bfloat16
        assert (found.grad.float() - wanted).abs().max() < 0.01 * wanted.abs().max()


def test_a_nearly_certain_token_keeps_its_small_gradient_in_bfloat16() -> None:
    """1 - p is less than half a unit in the last place of a bfloat16 p: the difference must be taken before rounding."""
    hidden, weight = torch.ones(1, 1).bfloat16().requires_grad_(), torch.tensor([[7.0], [0.0]]).bfloat16()
    target_logprobs(hidden, weight, torch.tensor([0]), 1.0, None).sampled.sum().backward()
    assert hidden.grad.item() == pytest.approx(7 / (1 + np.exp(7)), rel=0.01)


def test_the_gradient_goes_straight_to_where_data_parallelism_sums_it() -> None:
    """By Megatron's protocol: a weight with `main_grad` gets it added; `grad` is ignored if `grad_added_to_main_grad`."""
    hidden, weight = layer(6, 37)
    targets = torch.arange(6)
    (wanted,) = torch.autograd.grad(target_logprobs(hidden, weight, targets, 1.0, None).sampled.sum(), weight)
    held = torch.nn.Parameter(weight.detach())
    held.main_grad = torch.ones(37, HIDDEN)  # type: ignore[attr-defined]
    seen: list[bool] = []
    accumulates = held.expand_as(held).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulates.register_hook(lambda *_: seen.append(held.grad is not None))
    with blocks_of(10):
        target_logprobs(hidden, held, targets, 1.0, None).sampled.sum().backward()
    torch.testing.assert_close(held.main_grad - 1, wanted, atol=1e-5, rtol=1e-4)
    assert seen == [True], "the hook has run, and has found a gradient"
    assert held.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert held.grad.untyped_storage().nbytes() == 4


def test_no_more_logits_than_a_blocks_exist() -> None:
    hidden, weight = layer(64, 4000)
    with blocks_of(100), LiveTensors() as seen:
        target_logprobs(hidden, weight, torch.arange(64), 1.0, None, entropy=True).sampled.sum().backward()
    gradients, block, row = 4 * HIDDEN * (64 + 4000), 4 * 64 * 100, 4 * 64
    assert seen.peak < gradients + 2 * block + 40 * row
    assert seen.peak < 4 * 64 * 4000


def supports(kept: torch.Tensor) -> Support:
    """Of bool[T, V]; a row of False has none."""
    rows, ids = kept.nonzero(as_tuple=True)
    return Support(kept.any(1), rows, ids)


def drawn(rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets, and ids kept: of two thirds of the rows, and the target is among them."""
    targets = torch.randint(0, vocabulary, (rows,))
    kept = torch.rand(rows, vocabulary) < 0.3
    kept[torch.arange(rows), targets] = True
    kept[torch.rand(rows) < 1 / 3] = False
    return targets, kept


@given(st.integers(1, 40), st.integers(2, 50), st.integers(0, 1 << 16), st.sampled_from([0.5, 1.0, 1.6]), st.integers(1, 60))
def test_over_a_support_they_are_those_of_log_softmax(rows: int, vocabulary: int, seed: int, temperature: float, ids: int) -> None:
    """Both over supports and over the whole vocabulary, and of further ids, with a gradient of their own each."""
    hidden, weight = layer(rows, vocabulary, seed)
    targets, kept = drawn(rows, vocabulary)
    upstream, top, of_top = torch.randn(2, rows), torch.randint(0, vocabulary, (rows, 3)), torch.randn(rows, 3)
    with blocks_of(ids):
        got = target_logprobs(hidden, weight, targets, temperature, None, supports(kept), entropy=True, top=top)
        gradients = torch.autograd.grad((got.sampled, got.whole, got.top), (hidden, weight), (*upstream, of_top))
        bare = target_logprobs(hidden, weight, targets, temperature, None, entropy=True)
        of_bare = torch.autograd.grad(bare.sampled, (hidden, weight), upstream[0])
    logits = hidden @ weight.t() / temperature
    left = torch.where(kept | ~kept.any(1, keepdim=True), logits, -torch.inf)
    expected, full = (torch.log_softmax(one, dim=1) for one in (left, logits))
    sampled, whole = (one.gather(1, targets[:, None]).squeeze(1) for one in (expected, full))
    torch.testing.assert_close(got.sampled, sampled, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.whole, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(bare.sampled, whole, atol=1e-5, rtol=1e-5)
    assert bare.whole is None
    for one in (got, bare):
        torch.testing.assert_close(one.entropy, -(full.exp() * full).sum(dim=1).detach(), atol=1e-5, rtol=1e-5)
    at = logits.gather(1, top) - logits.gather(1, targets[:, None]) + sampled[:, None]
    torch.testing.assert_close(got.top, at, atol=2e-5, rtol=1e-5)
    wanted = torch.autograd.grad((sampled, whole, at), (hidden, weight), (*upstream, of_top), retain_graph=True)
    of_whole = torch.autograd.grad(whole, (hidden, weight), upstream[0])
    for mine, other in zip((*gradients, *of_bare), (*wanted, *of_whole), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("ids", [2, 4])
def test_what_was_not_sampled_from_may_be_as_probable_as_it_likes(ids: int) -> None:
    logits = torch.tensor([[0.0, 1.0, 3000.0, 2.0], [5.0, 1.0, 0.0, 2.0]], requires_grad=True)
    kept = torch.tensor([[True, True, False, False], [False, False, False, True]])
    with blocks_of(ids):
        got = target_logprobs(logits, torch.eye(4), torch.tensor([1, 3]), 1.0, None, supports(kept)).sampled
        got.sum().backward()
    assert got[0].item() == pytest.approx(-np.log(1 + np.exp(-1)), abs=1e-6)
    assert got[1].item() == 0.0  # it could not have been another
    assert logits.grad.isfinite().all()
    assert logits.grad[:, 2].tolist() == [0.0, 0.0]
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_blocks_have_about_as_many_logits_however_many_rows_there_are() -> None:
    for cpu, entries in ((True, 1 << 22), (False, 1 << 26)):
        for rows in (0, 1, 1000, 1 << 20):
            ids = head_blocks.width(rows, 150_000, cpu)
            assert ids in (150_000, 128) or entries - rows < rows * ids <= entries
