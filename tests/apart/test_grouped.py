"""Experts multiplied all at once are experts multiplied one by one."""

from __future__ import annotations

import pytest
import torch

from asyncmoe.platform import megatron

megatron.prepare()

from asyncmoe.platform.megatron.grouped_experts import multiply  # noqa: E402


def one_by_one(rows: torch.Tensor, counts: list[int], weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part @ weight.t() for part, weight in zip(rows.split(counts), weights, strict=True)])


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [7, 0, 0, 0], [0, 0, 0, 2]])
def test_rows_and_gradients(counts: list[int], dtype: torch.dtype, limit: float, joint: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    weights = [torch.randn(24, 16, dtype=dtype, requires_grad=True) for _ in counts]
    given = [torch.stack(weights)] if joint else weights
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    upstream = torch.randn(sum(counts), 24, dtype=dtype)
    wanted = one_by_one(rows, counts, weights)
    of_wanted = torch.autograd.grad(wanted, [rows, *weights], upstream)
    made = multiply(rows, ends, *given)
    of_made = torch.autograd.grad(made, [rows, *weights], upstream)
    for got, want in zip((made, *of_made), (wanted, *of_wanted), strict=True):
        assert got.shape == want.shape
        assert got.numel() == 0 or (got - want).abs().max().item() <= limit * max(1.0, want.abs().max().item())


def test_a_gradient_that_is_one_number_expanded() -> None:
    rows, weights = torch.randn(5, 8, requires_grad=True), [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    multiply(rows, torch.tensor([2, 5], dtype=torch.int32), *weights).sum().backward()
    assert torch.allclose(rows.grad, one_by_one(torch.ones(5, 8), [2, 3], [w.detach().t() for w in weights]), atol=1e-6)  # type: ignore[arg-type]


def test_one_row_that_is_expanded() -> None:
    rows = torch.randn(8).expand(1, 8)
    weights = [torch.randn(8, 8) for _ in range(2)]
    made = multiply(rows, torch.tensor([0, 1], dtype=torch.int32), *weights)
    assert torch.allclose(made, rows @ weights[1].t(), atol=1e-6)


def test_no_copy_of_the_weights_is_kept_for_the_backward_pass() -> None:
    rows, weights = torch.randn(5, 8, requires_grad=True), [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    known = {tensor.data_ptr() for tensor in (rows, *weights)}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        multiply(rows, torch.tensor([2, 2, 5], dtype=torch.int32), *weights)
    assert {tensor.data_ptr() for tensor in kept if tensor.dtype == torch.float32} == known


def test_no_layer_asks_the_device_how_many_rows_an_expert_has() -> None:
    """A tensor that has no values stands in for one that a host cannot read without waiting."""
    rows = torch.empty(5, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.empty(24, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    ends = torch.empty(2, device="meta", dtype=torch.int32)
    multiply(rows, ends, *weights).sum().backward()
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in weights)
