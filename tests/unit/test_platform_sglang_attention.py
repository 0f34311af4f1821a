"""Sequences that share a call of the attention kernel on a CPU see what each alone would see."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.platform.sglang import cpu_attention
from asyncmoe.platform.sglang.patching import PatchTargetGone

LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=20)


class Backend:
    """As SGLang 0.5's, one sequence after another."""

    alone = 0

    def _run_sdpa_forward_decode(self, *given: Any, **named: Any) -> torch.Tensor:
        query, output, k_cache, v_cache, table, requests, lengths, _, scale, grouped, *_ = (*given, *named.values())
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            output[row] = alone(query[row], k_cache[table[request, :length]], v_cache[table[request, :length]], scale, grouped)
        self.alone += len(lengths)
        return output


def alone(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, grouped: bool) -> torch.Tensor:
    """query [heads, d], keys and values [length, groups, d] -> [heads, d of values]."""
    k, v = (x.transpose(0, 1)[None] for x in (keys, values))
    return F.scaled_dot_product_attention(query[None, :, None], k, v, scale=scale, enable_gqa=grouped)[0, :, 0]


def patched() -> Any:
    module = ModuleType("backend")
    vars(module)["TorchNativeAttnBackend"] = type("Fresh", (Backend,), dict(vars(Backend)))
    cpu_attention._together(module)
    return module.TorchNativeAttnBackend()


def case(lengths: list[int], groups: int = 2, width: int = 8, wide: int = 8) -> tuple[torch.Tensor, ...]:
    """Query, output, caches, slots by request (beyond a sequence's end of no slot), requests and lengths."""
    draw = torch.Generator().manual_seed(sum(lengths))
    total, count = sum(lengths), len(lengths)
    query, output = torch.randn(count, 4, width, generator=draw), torch.full((count, 4, wide), torch.nan)
    caches = (torch.randn(total, groups, width, generator=draw), torch.randn(total, groups, wide, generator=draw))
    table, requests = torch.full((count + 2, max(lengths) + 3), 10**9), torch.randperm(count + 2, generator=draw)[:count]
    slots = torch.randperm(total, generator=draw).split(lengths)
    for request, mine in zip(requests, slots, strict=True):
        table[request, : len(mine)] = mine
    return query, output, *caches, table.int(), requests, torch.tensor(lengths)


@given(LENGTHS, st.sampled_from([(2, 8, 8), (4, 8, 8), (1, 24, 16)]), st.sampled_from([None, 0.3]))
def test_each_sees_its_own_sequence(lengths: list[int], sizes: tuple[int, int, int], scale: float | None) -> None:
    tensors = case(lengths, *sizes)
    backend = patched()
    found = backend._run_sdpa_forward_decode(*tensors, None, scale, sizes[0] != 4)
    wanted = Backend()._run_sdpa_forward_decode(tensors[0], torch.empty_like(found), *tensors[2:], None, scale, sizes[0] != 4)
    assert found is tensors[1]
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    short = [length for length in lengths if length <= 256]
    assert backend.alone <= len(lengths) - len(short) + len({(length - 1).bit_length() for length in short})


@given(LENGTHS)
def test_every_sequence_is_in_one_group_and_none_is_padded_to_twice_its_length(lengths: list[int]) -> None:
    found = cpu_attention.groups(lengths)
    assert sorted(number for numbers, _ in found for number in numbers) == list(range(len(lengths)))
    for numbers, longest in found:
        assert max(lengths[number] for number in numbers) == longest
        assert all(longest < 2 * lengths[number] for number in numbers)


@pytest.mark.parametrize("others", [{"sliding_window_size": 4}, {"is_cross_attn": True}, {"causal": True}, {"encoder_lens": torch.ones(3)}])
def test_other_attention_is_sglangs_own(others: dict[str, Any]) -> None:
    backend = patched()
    backend._run_sdpa_forward_decode(*case([3, 3, 3]), **{"encoder_lens": None, "scaling": None, "enable_gqa": True, **others})
    assert backend.alone == 3


def test_another_release_is_named() -> None:
    with pytest.raises(PatchTargetGone, match=r"TorchNativeAttnBackend\._run_sdpa_forward_decode is gone"):
        cpu_attention._together(SimpleNamespace(__name__="backend"))  # type: ignore[arg-type]
