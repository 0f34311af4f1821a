"""An adapter's names and shapes, and the form engines take it in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import UserError
from asyncmoe.models.attention import Grouped
from asyncmoe.models.lora import adapter as adapters
from asyncmoe.models.lora.adapter import ATTENTION, Adapter, Kind
from asyncmoe.models.shape import Shape
from tests.unit.adapters import LATENT, half, random_adapter, shape
from tests.unit.example_counts import examples

SHAPES = st.builds(
    shape,
    layers=st.integers(1, 3),
    experts=st.sampled_from([0, 2, 3]),
    hidden=st.sampled_from([8, 12]),
    width=st.sampled_from([4, 6]),
    dense=st.sampled_from([frozenset(), frozenset({0})]),
    shared=st.sampled_from([0, 12]),
    attention=st.sampled_from([Grouped(), LATENT, dataclasses.replace(LATENT, q_rank=None)]),
)


def kinds(m: Shape) -> st.SearchStrategy[Kind]:
    """Of adapters of a model."""
    return st.builds(
        Kind,
        targets=st.sets(st.sampled_from(m.adapters), min_size=1).map(tuple),
        rank=st.integers(1, 3),
        alpha=st.sampled_from([1, 2.5, 8]),
        experts=st.sampled_from(["per_expert", "shared_outer"]),
    )


MODELS = SHAPES.flatmap(lambda m: st.tuples(st.just(m), kinds(m)))
"""Models, and a kind of adapter of each."""


def test_names_and_shapes_of_a_layer() -> None:
    m = shape(layers=1, experts=2, hidden=8, width=6)
    assert adapters.halves(m, Kind(("down_proj", "gate_proj", "q_proj"), 3, 6.0, "shared_outer")) == {
        "layers.0.q_proj.a": (3, 8),
        "layers.0.q_proj.b": (16, 3),
        "layers.0.experts.shared.gate_proj.a": (3, 8),
        "layers.0.experts.0.gate_proj.b": (6, 3),
        "layers.0.experts.1.gate_proj.b": (6, 3),
        "layers.0.experts.0.down_proj.a": (3, 6),
        "layers.0.experts.1.down_proj.a": (3, 6),
        "layers.0.experts.shared.down_proj.b": (8, 3),
    }


@given(MODELS, st.integers(0, 99))
@settings(max_examples=examples(50), deadline=None)
def test_what_engines_are_given_holds_every_half_in_its_place(model, seed) -> None:  # type: ignore[no-untyped-def]
    m, kind = model
    adapter = random_adapter(m, kind, seed)
    given = adapters.served(m, adapter)
    assert {name: value.shape for name, value in given.items()} == adapters.served_shapes(m, kind)
    for layer in range(m.layers):
        dense = layer in m.dense_layers
        front = f"base_model.model.model.layers.{layer}."
        for target in adapters.served_targets(kind):
            for side in "ab":
                if target in ATTENTION or dense:
                    inner = "self_attn" if target in ATTENTION else "mlp"
                    value = given[f"{front}{inner}.{target}.lora_{side.upper()}.weight"]
                    expected = half(adapter, layer, None, target, side) if target in kind.targets else np.zeros_like(value)
                    assert np.array_equal(value, expected)
                    continue
                if m.shared_width:
                    value = given[f"{front}mlp.shared_experts.{target}.lora_{side.upper()}.weight"]
                    beside = half(adapter, layer, None, target, side, "shared") if target in kind.targets else np.zeros_like(value)
                    assert np.array_equal(value, beside)
                stack = given[f"{front}mlp.experts.{target}.lora_{side.upper()}.weight"]
                outer = side == ("b" if target == "down_proj" else "a")
                assert len(stack) == (1 if kind.experts == "shared_outer" and outer else m.experts)
                for expert in range(m.experts):
                    value = stack[min(expert, len(stack) - 1)]
                    expected = half(adapter, layer, expert, target, side) if target in kind.targets else np.zeros_like(value)
                    assert np.array_equal(value, expected)


@given(MODELS, st.integers(0, 99))
@settings(max_examples=examples(50), deadline=None)
def test_sharing_is_undone_and_found_again(model, seed) -> None:  # type: ignore[no-untyped-def]
    m, kind = model
    adapter = random_adapter(m, kind, seed)
    own = adapters.expanded(m, adapter)
    own.check(m)
    assert own.kind.experts == "per_expert"
    for pair in adapters.pairs(m, own.kind):
        assert np.array_equal(
            own.values[pair.a], half(adapter, pair.layer, pair.expert, pair.target, "a", pair.place if pair.expert is None else "")
        )
        assert np.array_equal(
            own.values[pair.b], half(adapter, pair.layer, pair.expert, pair.target, "b", pair.place if pair.expert is None else "")
        )
    if kind.experts == "shared_outer":
        again = adapters.shared(m, own)
        assert again.kind == kind
        assert {name: value.tobytes() for name, value in again.values.items()} == {n: v.tobytes() for n, v in adapter.values.items()}


def test_experts_that_differ_cannot_share() -> None:
    m, kind = shape(), Kind(("q_proj", "up_proj"), 2, 4.0)
    with pytest.raises(UserError, match=r"layers\.0\.experts\.1\.up_proj\.a: got values of its own, .*; set lora\.experts to per_expert"):
        adapters.shared(m, random_adapter(m, kind, 0))


def test_a_stack_is_never_given_in_part() -> None:
    assert adapters.served_targets(Kind(("v_proj",), 1, 1.0)) == ("q_proj", "k_proj", "v_proj")
    assert adapters.served_targets(Kind(("o_proj",), 1, 1.0)) == ("o_proj",)
    assert adapters.served_targets(Kind(("q_a_proj", "q_b_proj"), 1, 1.0)) == ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")
    assert adapters.served_targets(Kind(("down_proj", "o_proj"), 1, 1.0)) == ("o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("changes", "dtype", "match"),
    [
        ({"layers.1.q_proj.b": None}, "float32", r"layers\.1\.q_proj\.b: got nothing"),
        ({"layers.2.q_proj.b": np.zeros((16, 2), np.float32)}, "float32", r"got layers\.2\.q_proj\.b"),
        ({"layers.1.q_proj.b": np.zeros((16, 3), np.float32)}, "float32", r"layers\.1\.q_proj\.b: got float32 \(16, 3\)"),
        ({}, "int8", "got int8"),
        ({}, "float16", "got float32 .*, expected float16"),
    ],
)
def test_what_is_wrong_is_said_by_name(changes: dict[str, np.ndarray | None], dtype: str, match: str) -> None:
    m, kind = shape(), Kind(("q_proj", "up_proj"), 2, 4.0)
    values = {name: value for name, value in {**random_adapter(m, kind, 0).values, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=match):
        Adapter(kind, dtype, values).check(m)
    with pytest.raises(UserError, match="adapter's targets: got q_proj"):
        Adapter(kind, "float32", values).check(shape(attention=LATENT))


def test_an_adapter_that_engines_cannot_hold_is_refused() -> None:
    adapters.check_rank(Kind(("q_proj",), 2, 4.0), 2)
    with pytest.raises(UserError, match="adapter's rank: got 2"):
        adapters.check_rank(Kind(("q_proj",), 2, 4.0), 1)
