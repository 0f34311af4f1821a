"""An adapter's names and shapes, and its forms in engines: sent and in memory."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.models.attention import Grouped
from asyncmoe.models.lora import adapter as adapters
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.lora.sglang import memory_layout
from asyncmoe.models.parallel import EngineParallel
from asyncmoe.models.shape import Shape
from tests.unit.adapters import LATENT, copied, random_adapter, shape
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


def test_a_stack_is_never_given_in_part() -> None:
    assert adapters.served_targets(Kind(("v_proj",), 1, 1.0)) == ("q_proj", "k_proj", "v_proj")
    assert adapters.served_targets(Kind(("o_proj",), 1, 1.0)) == ("o_proj",)
    assert adapters.served_targets(Kind(("q_a_proj", "q_b_proj"), 1, 1.0)) == ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")
    assert adapters.served_targets(Kind(("down_proj", "o_proj"), 1, 1.0)) == ("o_proj", "gate_proj", "up_proj", "down_proj")


@given(MODELS, st.sampled_from([EngineParallel(), EngineParallel(tp=2), EngineParallel(tp=2, ep=2), EngineParallel(tp=4)]))
@settings(max_examples=examples(50), deadline=None)
def test_the_ranks_of_an_engine_hold_every_element_of_a_half(model, parallel) -> None:  # type: ignore[no-untyped-def]
    m, kind = model
    if (m.experts and (m.experts % parallel.ep or m.expert_width % parallel.moe_tp)) or (m.dense_layers and m.dense_width % parallel.tp):
        return
    held = {name: np.zeros(size, int) for name, size in adapters.halves(m, kind).items()}
    for rank in range(parallel.world):
        layout = memory_layout(m, kind, parallel, rank, "float32")
        # As a destination it is complete: every element of every storage is written.
        assert all(np.isfinite(value).all() for value in copied(layout, random_adapter(m, kind, 0), fill=np.nan).values())
        for piece in layout.pieces:
            if piece.tensor in held:
                box = tuple(slice(start, start + extent) for start, extent in zip(piece.box.start, piece.box.extent, strict=True))
                held[piece.tensor][box] += 1
    assert all(count.min() >= 1 for count in held.values())
