"""Adapters: which are refused, and how their halves are spread over ranks. What they compute is `tests/ranks/test_lora.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from plan_steps import carry_out
from reshard_ranks import blank, filled, numbered

from asyncmoe import config
from asyncmoe.config.lora import LoraSection
from asyncmoe.errors import ConfigError
from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.models.lora.adapter import Kind, halves, kind_of
from asyncmoe.models.lora.halves import Half, check, layer_halves
from asyncmoe.models.lora.megatron import canonical_layout, rank_layouts
from asyncmoe.models.shape import Shape
from asyncmoe.reshard import plan
from asyncmoe.trainer.lora import values
from tests.unit.adapters import ALL, LATENT
from tests.unit.adapters import shape as shape_with

SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 68, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 4, "mlp_only_layers": [1],
}  # fmt: skip
MOE = family_of(SMALL).shape_of(SMALL)
DENSE = family_of({"model_type": "qwen3"}).shape_of({**SMALL, "model_type": "qwen3"})
LATENT_MOE = shape_with(layers=4, experts=4, hidden=8, width=4, dense=frozenset({1}), shared=6, attention=LATENT)
CASES = {
    "per_expert": (MOE, Kind(ALL, 2, 4.0)),
    "shared_outer": (MOE, Kind(ALL, 2, 4.0, "shared_outer")),
    "some": (MOE, Kind(("v_proj", "down_proj"), 1, 1.0, "shared_outer")),
    "latent": (LATENT_MOE, Kind(LATENT_MOE.adapters, 2, 4.0)),
    "latent shared_outer": (LATENT_MOE, Kind(("q_a_proj", "kv_b_proj", "up_proj"), 2, 4.0, "shared_outer")),
}
cases = pytest.mark.parametrize(("m", "kind"), CASES.values(), ids=CASES)


def parsed(**sections: Any) -> config.Config:
    return config.parse({"run": {"dir": "runs/x", "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}, **sections})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"targets": ["q_proj", "linear_qkv"]}, r"lora\.targets: got linear_qkv, .*write q_proj, k_proj, v_proj"),
        ({"targets": []}, r"lora\.targets: got none"),
        ({"targets": "q_proj"}, r"lora\.targets: got 'q_proj'"),
        ({"targets": ["q_proj", "q_proj"]}, r"lora\.targets: got q_proj twice"),
        ({"targets": ["q_proj"], "experts": "shared_outer"}, r"lora\.experts: got shared_outer"),
        ({"rank": 0}, r"lora\.rank: got 0"),
        ({"alpha": 0}, r"lora\.alpha: got 0"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(lora=values)


@pytest.mark.parametrize("method", ["broadcast", "disk"])
def test_adapters_reach_engines_from_shard_to_shard_only(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"sync\.method: got {method}, expected reshard because train is lora"):
        parsed(train="lora", sync={"method": method})


@pytest.mark.parametrize(
    ("section", "shape", "said"),
    [
        (LoraSection(rank=2, experts="shared_outer"), DENSE, r"lora\.experts: got shared_outer"),
        (LoraSection(rank=5), MOE, r"lora\.rank: got 5, expected at most 4, the smaller side of [kg]"),
        (LoraSection(rank=9, targets=("q_proj",)), MOE, r"lora\.rank: got 9, expected at most 8, the smaller side of q_proj"),
        (LoraSection(rank=6), LATENT_MOE, r"lora\.rank: got 6, expected at most 5, the smaller side of kv_b_proj"),
    ],
)
def test_what_the_model_cannot_have_is_refused(section: LoraSection, shape: Shape, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(kind_of(section, shape), shape)
    check(kind_of(section.model_copy(update={"rank": 1, "experts": "per_expert"}), shape), shape)
    assert kind_of(LoraSection(), shape).targets == shape.adapters


def grids() -> Iterator[MegatronParallel]:
    for tp, pp, vpp, ep, etp, dp in itertools.product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2, 4)):
        if tp * dp % (ep * etp) == 0 and tp * pp * dp <= 8 and (ep > 1 or etp == tp) and (vpp == 1 or pp == 2):
            yield MegatronParallel(tp, pp, ep, etp, dp, vpp=vpp)


@cases
def test_out_to_every_rank_and_back(m: Shape, kind: Kind) -> None:
    """Whole halves reach every rank, whose parameters have the shapes of the plan, and come back from any of them."""
    tensors = halves(m, kind)
    given = numbered(tensors)
    whole = canonical_layout(m, kind, "int32")
    seen = 0
    for grid in grids():
        ranks = rank_layouts(m, kind, grid, "int32")
        held = {one.rank: blank(one) for one in ranks}
        carry_out(plan(tensors, [whole.at(0)], ranks), {0: filled(whole, given)}, held)
        back = blank(whole)
        carry_out(plan(tensors, ranks, [whole]), held, {0: back})
        for name, value in filled(whole, given).items():
            np.testing.assert_array_equal(back[name], value, err_msg=f"{grid} {name}")
        for rank, arrays in held.items():
            assert sorted(array.shape for array in arrays.values()) == sorted(half.shape for _, half in of_rank(m, kind, grid, rank))
        seen += 1
    assert seen > 20


@cases
def test_every_value_counts_once_in_a_norm(m: Shape, kind: Kind) -> None:
    """Over the ranks of one replica: the first data-parallel one, or the first expert-data-parallel one of halves reduced there."""
    total = sum(int(np.prod(shape)) for shape in halves(m, kind).values())
    for grid in grids():
        counted = sum(
            int(np.prod(half.shape))
            for rank in range(grid.world)
            for _, half in of_rank(m, kind, grid, rank)
            if half.counted and (rank % (grid.tp * grid.dp) < grid.etp * grid.ep if half.expert_data else grid.dp_rank(rank) == 0)
        )
        assert counted == total, grid


def test_initial_values_are_cut_from_the_same_whole() -> None:
    for m, kind in CASES.values():
        whole: dict[str, torch.Tensor] = {}
        for layer, half in of_rank(m, kind, MegatronParallel(), 0):
            each = values.initial(half, layer, seed=3)
            whole |= zip((f"layers.{layer}.{n}" for n in half.canonical), each if half.experts is not None else [each], strict=True)
        assert {name: tuple(half.shape) for name, half in whole.items()} == halves(m, kind)
        for grid in grids():
            for layer, half in of_rank(m, kind, grid, grid.world - 1):
                parts = [whole[f"layers.{layer}.{name}"][half.box] for name in half.canonical]
                assert torch.equal(values.initial(half, layer, seed=3), torch.stack(parts) if half.experts is not None else parts[0])


def test_another_seed_another_start() -> None:
    half = Half("q_proj", "a", "linear_qkv", (2, 8))
    assert torch.equal(values.initial(half, 0, seed=1), values.initial(half, 0, seed=1))
    assert not torch.equal(values.initial(half, 0, seed=1), values.initial(half, 0, seed=2))
    assert not torch.equal(values.initial(half, 0, seed=1), values.initial(half, 1, seed=1))
    assert float(values.initial(half, 0, seed=1).abs().max()) <= 8**-0.5


def of_rank(m: Shape, kind: Kind, grid: MegatronParallel, rank: int) -> Iterator[tuple[int, Half]]:
    """(layer of the model, half)."""
    for layers in grid.chunk_layers(m.layers, rank):
        for layer in layers:
            yield from ((layer, half) for half in layer_halves(m, kind, grid, rank, layer in m.dense_layers))
