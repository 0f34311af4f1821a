"""The engines' memory of an adapter as layouts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.models.lora import adapter as adapters
from asyncmoe.models.lora.sglang import memory_layout
from asyncmoe.models.parallel import EngineParallel
from tests.unit.adapters import copied, random_adapter
from tests.unit.example_counts import examples
from tests.unit.test_adapters import MODELS


@given(MODELS, st.sampled_from([EngineParallel(), EngineParallel(tp=2), EngineParallel(tp=2, ep=2), EngineParallel(tp=4)]))
@settings(max_examples=examples(50), deadline=None)
def test_the_ranks_of_an_engine_hold_every_element_of_a_half(model, parallel) -> None:  # type: ignore[no-untyped-def]
    m, kind = model
    if (m.experts and (m.experts % parallel.ep or m.expert_width % parallel.moe_tp)) or (m.dense_layers and m.dense_width % parallel.tp):
        return
    held = {name: np.zeros(size, int) for name, size in adapters.halves(m, kind).items()}
    for rank in range(parallel.world):
        layout = memory_layout(m, kind, parallel, rank, "float32")
        # As a destination it is whole: every element of every storage is written.
        assert all(np.isfinite(value).all() for value in copied(layout, random_adapter(m, kind, 0), fill=np.nan).values())
        for piece in layout.pieces:
            if piece.tensor in held:
                box = tuple(slice(start, start + extent) for start, extent in zip(piece.box.start, piece.box.extent, strict=True))
                held[piece.tensor][box] += 1
    assert all(count.min() >= 1 for count in held.values())
