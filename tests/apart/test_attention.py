"""Attention to packed sequences: every kernel computes the same, and no layer waits for the device to learn where sequences end."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.platform import megatron

megatron.prepare()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

from asyncmoe.errors import InvariantBroken  # noqa: E402
from asyncmoe.platform.megatron import packed_attention as attention  # noqa: E402
from asyncmoe.platform.megatron import rope  # noqa: E402
from asyncmoe.trainer.model import layers  # noqa: E402, F401  layers installs the angles
from tests.ranks.context import by_definition  # noqa: E402

BOUNDS = [0, 5, 6, 13]
CONFIG = SimpleNamespace(context_parallel_size=1, attention_dropout=0.0, window_size=None)
REAL: Any = attention.varlen()
ARGUMENTS = attention.arguments()
META = torch.device("meta")
"""Where nobody can read a tensor, as a host cannot read a GPU's without waiting."""


def core(scale: float | None = None) -> attention.PackedAttention:
    made = attention.PackedAttention.__new__(attention.PackedAttention)
    torch.nn.Module.__init__(made)
    made.config, made.scale, made._ranks = CONFIG, scale, None
    return made


def sequences(device: torch.device | str = "cpu", bounds: list[int] = BOUNDS) -> attention.PackedSequences:
    return attention.PackedSequences(torch.tensor(bounds, dtype=torch.int32, device=device), bounds, 7)


def vectors(heads: int, groups: int, width: int, of_values: int, rows: int = BOUNDS[-1]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = ((heads, width), (groups, width), (groups, of_values))
    return [torch.randn(rows, *size, requires_grad=True) for size in sizes]


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, bounds: Sequence[int] = BOUNDS
) -> torch.Tensor:
    """By the definition, with all scores."""
    return torch.cat([by_definition(query[a:b], key[a:b], value[a:b], scale) for a, b in pairwise(bounds)]).flatten(1)


def stand_in(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any) -> torch.Tensor:
    """Takes what torch's kernel takes (`signature` below), and refuses what that refuses."""
    signature(REAL).bind(query, key, value, cu_q, cu_k, max_q, max_k, **options)
    assert all(one.is_contiguous() for one in (query, key, value))
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert options["window_size"] == (-1, 0)
    assert options["enable_gqa"] == (query.shape[1] != key.shape[1])
    assert (max_q, max_k) == (7, 7)
    bounds = cu_q.tolist()
    parts = []
    for first, last in pairwise(bounds):
        q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scale"], enable_gqa=options["enable_gqa"])
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def older(query: Any, key: Any, *rest: Any, **options: Any) -> torch.Tensor:
    """As torch 2.11's, which knows nothing of groups."""
    assert "enable_gqa" not in options
    assert key.shape[1] == query.shape[1]
    return stand_in(query, key, *rest, **options, enable_gqa=False)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("sizes", [(4, 4, 16, 16), (4, 2, 16, 16), (4, 4, 24, 16)], ids=["heads", "groups", "latent"])
@pytest.mark.parametrize("kind", ["each", "varlen", "older"])
def test_rows_see_their_own_sequence(kind: str, sizes: tuple[int, ...], scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "each":
        monkeypatch.setattr(attention, "kernel", lambda *_: "varlen")
        monkeypatch.setattr(attention, "varlen", lambda: stand_in if kind == "varlen" else older)
        monkeypatch.setattr(attention, "arguments", lambda: ARGUMENTS if kind == "varlen" else set())
    vs = vectors(*sizes)
    check(core(scale)(*vs, packed_seq_params=sequences()), expected(*vs, scale), vs)


def check(made: torch.Tensor, wanted: torch.Tensor, given: list[torch.Tensor]) -> None:
    """Outputs and gradients are alike."""
    upstream = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(one, given, upstream) for one in (made, wanted))
    for got, want in zip((made, *next(gradients)), (wanted, *next(gradients)), strict=True):
        assert torch.allclose(got, want, atol=1e-5)


LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 700)), min_size=1, max_size=12)


@settings(max_examples=15)
@given(LENGTHS, st.booleans())
def test_sequences_of_all_lengths_attend_as_defined(lengths: list[int], zero: bool) -> None:
    bounds = [0, *accumulate(lengths)]
    if zero:
        bounds.insert(1, 0)  # an empty sequence
    vs = vectors(2, 1, 8, 8, bounds[-1])
    packed = attention.PackedSequences(torch.tensor(bounds, dtype=torch.int32), bounds, max(lengths))
    check(core()(*vs, packed_seq_params=packed), expected(*vs, None, bounds), vs)


def test_values_narrower_than_keys_keep_no_scores() -> None:
    """As DeepSeek's are: torch's kernel that takes them as they are keeps a score for every pair of rows."""
    rows, bounds = 512, [0, 512]
    query, key = (torch.randn(rows, 2, 24, requires_grad=True) for _ in range(2))
    value = torch.randn(rows, 2, 16, requires_grad=True)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        core()(query, key, value, packed_seq_params=attention.PackedSequences(torch.tensor(bounds), bounds, rows))
    assert max(shape.numel() for shape in kept) < rows * rows


def test_the_kernel_for_what_there_is() -> None:
    assert attention.kernel("cuda", torch.bfloat16, 128) == "varlen"
    assert attention.kernel("cuda", torch.bfloat16, 192) == "varlen"
    assert attention.kernel("cuda", torch.bfloat16, 300) == "each"
    assert attention.kernel("cuda", torch.float32, 128) == "each"
    assert attention.kernel("cpu", torch.bfloat16, 128) == "each"


@pytest.mark.parametrize("kind", ["each", "varlen"])
def test_no_layer_asks_the_device_where_sequences_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "kernel", lambda *_: kind)
    monkeypatch.setattr(attention, "varlen", lambda: lambda query, *_, **__: torch.empty_like(query))
    query, key, value = (torch.empty(BOUNDS[-1], heads, 16, device=META) for heads in (4, 2, 2))
    with pytest.raises(Exception, match="meta"):  # the stand-in works
        sequences(META).cu_seqlens_q.tolist()
    assert core()(query, key, value, packed_seq_params=sequences(META)).shape == (BOUNDS[-1], 64)
    angles = torch.empty(7, 1, 1, 16, device=META)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    assert rope_utils._apply_rotary_pos_emb_thd(query, sequences(META).cu_seqlens_q, angles, cp_group=alone).shape == query.shape


def test_bounds_that_are_not_the_rows() -> None:
    with pytest.raises(InvariantBroken, match="got 0 to 12, expected 0 to 13"):
        core()(*vectors(4, 4, 16, 16), packed_seq_params=sequences(bounds=[0, 12]))


@pytest.mark.parametrize("bounds", [[0, 5, 6, 13], [0, 13], [0, 1, 2, 13], [0, 12, 13]])
def test_angles_start_anew_with_each_sequence(bounds: list[int]) -> None:
    ends = torch.tensor(bounds, dtype=torch.int32)
    wanted = torch.cat([torch.arange(last - first) for first, last in pairwise(bounds)])
    assert torch.equal(rope.positions(ends, bounds[-1]), wanted)
    rows, angles = torch.randn(13, 2, 16), torch.randn(max(wanted) + 1, 1, 1, 16)
    made = rope_utils._apply_rotary_pos_emb_thd(rows, ends, angles, cp_group=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    each = [rope_utils._apply_rotary_pos_emb_bshd(rows[i : i + 1, None], angles[at : at + 1])[:, 0] for i, at in enumerate(wanted)]
    assert torch.allclose(made, torch.cat(each), atol=1e-6)
