"""Adapters: refusals, and the distribution of their halves over ranks. Their computation: `tests/ranks/test_lora.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from plan_steps import carry_out
from reshard_ranks import blank, filled, numbered
from test_models_plan import SMALL as TWO_LAYERS

from asyncmoe.config.lora import LoraSection
from asyncmoe.errors import ConfigError
from asyncmoe.launch import local
from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.models.lora.adapter import Kind, halves, kind_of
from asyncmoe.models.lora.halves import Half, canonical_layout, check, layer_halves, rank_layout
from asyncmoe.models.shape import Shape
from asyncmoe.reshard import plan
from asyncmoe.trainer.lora import values
from tests.configs import minimal
from tests.unit.adapters import ALL, LATENT
from tests.unit.adapters import shape as shape_with

SMALL = {**TWO_LAYERS, "num_hidden_layers": 4}
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


@pytest.mark.parametrize("method", ["broadcast", "disk"])
def test_adapters_reach_engines_from_shard_to_shard_only(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"sync\.method: got {method}, expected reshard because train is lora"):
        minimal(train="lora", sync={"method": method})


def test_experts_that_there_are_not_share_nothing() -> None:
    with pytest.raises(ConfigError, match=r"lora\.experts: got shared_outer"):
        check(kind_of(LoraSection(rank=2, experts="shared_outer"), DENSE), DENSE)
    for shape in (DENSE, MOE, LATENT_MOE):
        check(kind_of(LoraSection(), shape), shape)
        assert kind_of(LoraSection(), shape).targets == shape.adapters


def test_a_rank_that_engines_keep_no_memory_for_is_refused() -> None:
    def check_with(limit: str) -> None:
        local._check_adapter(minimal(train="lora", lora={"rank": 3}, engines={"args": ["--max-lora-rank", limit]}), SMALL)

    check_with("3")
    with pytest.raises(ConfigError, match=r"lora\.rank: got 3, expected at most 2"):
        check_with("2")


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
        ranks = [rank_layout(m, kind, grid, rank, "int32") for rank in range(grid.world)]
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
            if half.counted and rank % (grid.tp * grid.dp) < (grid.etp * grid.ep if half.expert_data else grid.tp)
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
                box = tuple(slice(start, start + extent) for start, extent in zip(half.box.start, half.box.extent, strict=True))
                parts = [whole[f"layers.{layer}.{name}"][box] for name in half.canonical]
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
