"""Log-probabilities of what was sampled, over what it was sampled from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.trainer.data.replay_data import Support
from asyncmoe.trainer.model.logprobs import target_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("rows_", [1, 5, 1500])
def test_target_logprobs_are_those_of_log_softmax(temperature: float, rows_: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows_, 37) * 6).requires_grad_()
    targets = torch.randint(0, 37, (rows_,))
    upstream = torch.randn(rows_)
    before = logits.detach().clone()
    got, entropy = target_logprobs(logits, targets, temperature, None, entropy=True)
    (gradient,) = torch.autograd.grad(got, logits, upstream)
    full = torch.log_softmax(logits / temperature, dim=1)
    expected = full.gather(1, targets[:, None]).squeeze(1)
    (reference,) = torch.autograd.grad(expected, logits, upstream)
    assert torch.equal(logits.detach(), before)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-4)
    assert entropy is not None
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(dim=1).detach(), atol=1e-5, rtol=1e-5)


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = (torch.randn(8, 4096) * 3).bfloat16().requires_grad_()
    targets = torch.randint(0, 4096, (8,))
    got, entropy = target_logprobs(logits, targets, 1.0, None)
    expected = torch.log_softmax(logits.float(), dim=1).gather(1, targets[:, None]).squeeze(1)
    assert entropy is None
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    got.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def supports(kept: torch.Tensor) -> Support:
    """Of bool[T, V]; a row of False has none."""
    rows, ids = kept.nonzero(as_tuple=True)
    return Support(kept.any(1), rows, ids)


def drawn(rows: int, vocabulary: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, targets, and ids kept: of two thirds of the rows, and the target is among them."""
    torch.manual_seed(seed)
    logits, targets = torch.randn(rows, vocabulary) * 6, torch.randint(0, vocabulary, (rows,))
    kept = torch.rand(rows, vocabulary) < 0.3
    kept[torch.arange(rows), targets] = True
    kept[torch.rand(rows) < 1 / 3] = False
    return logits, targets, kept


@given(st.integers(1, 40), st.integers(2, 50), st.integers(0, 1 << 16), st.sampled_from([0.5, 1.0, 1.6]))
def test_over_a_support_they_are_those_of_log_softmax_of_what_is_left(rows: int, vocabulary: int, seed: int, temperature: float) -> None:
    logits, targets, kept = drawn(rows, vocabulary, seed)
    logits.requires_grad_()
    upstream = torch.randn(rows)
    got, entropy = target_logprobs(logits, targets, temperature, None, supports(kept), entropy=True)
    (gradient,) = torch.autograd.grad(got, logits, upstream)
    left = torch.where(kept | ~kept.any(1, keepdim=True), logits / temperature, -torch.inf)
    expected = torch.log_softmax(left, dim=1).gather(1, targets[:, None]).squeeze(1)
    (reference,) = torch.autograd.grad(expected, logits, upstream)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-4)
    full = torch.log_softmax(logits / temperature, dim=1)
    assert entropy is not None
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(dim=1).detach(), atol=1e-5, rtol=1e-5)


def test_what_was_not_sampled_from_may_be_as_probable_as_it_likes() -> None:
    logits = torch.tensor([[0.0, 1.0, 3000.0, 2.0], [5.0, 1.0, 0.0, 2.0]], requires_grad=True)
    kept = torch.tensor([[True, True, False, False], [False, False, False, True]])
    got, _ = target_logprobs(logits, torch.tensor([1, 3]), 1.0, None, supports(kept))
    got.sum().backward()
    assert got[0].item() == pytest.approx(-np.log(1 + np.exp(-1)), abs=1e-6)
    assert got[1].item() == 0.0  # it could not have been another
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[:, 2].tolist() == [0.0, 0.0]
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0, 0.0]


@given(st.integers(1, 30), st.integers(0, 1 << 16))
def test_support_of_some_rows(rows: int, seed: int) -> None:
    _, _, kept = drawn(rows, 9, seed)
    some = torch.randperm(rows)[: 1 + rows // 2]
    got, expected = supports(kept).take(some), kept[some]
    made = torch.zeros_like(expected)
    made[got.rows, got.ids] = True
    assert torch.equal(made, expected)
    assert torch.equal(got.here, expected.any(1))
