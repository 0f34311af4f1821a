"""SGLang's layouts of all families against SGLang's own loader, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from model_cases import MODELS
from recorded import QUANTISED, Recorded, beside, cases, read
from reshard_ranks import Arrays, blank, filled, numbered

from asyncmoe.models import EngineParallel, family_of
from asyncmoe.models.quantised import quantised
from asyncmoe.models.shape import Shapes
from asyncmoe.reshard import LocalTransport, RankLayout, exchange, plan
from asyncmoe.reshard.float8 import FLOAT8, with_scale_tensors, with_scales
from asyncmoe.reshard.layout import contiguous_strides


def loaded(known: Recorded, tensors: Shapes, checkpoint: RankLayout, layouts: list[RankLayout]) -> list[Arrays]:
    """What SGLang's loader makes of a checkpoint on each rank, after a comparison with an exchange."""
    on_disk, found = filled(checkpoint, numbered(tensors)), []
    assert {name: list(array.shape) for name, array in on_disk.items()} == dict(known.document["hf_tensors"])
    for rank, layout in enumerate(layouts):
        got = blank(layout)
        exchange(plan(tensors, [checkpoint.at(rank)], [layout]), LocalTransport(rank), on_disk, got)
        found.append(known.loaded(rank, on_disk))
        assert got.keys() == found[-1].keys()
        for name, array in found[-1].items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
    return found


@pytest.mark.parametrize(("model", "case"), cases())
def test_engine_parameters_are_those_sglang_loads(model: str, case: str) -> None:
    known = read(model, case)
    family = family_of(known.hf)
    tensors, checkpoint = family.tensors(known.hf), family.hf_layout(known.hf, "int32")
    assert known.engine.world == len(known.document["ranks"])
    layouts = [family.sglang_layout(known.hf, known.engine, rank, "int32") for rank in range(known.engine.world)]
    for rank, expected in enumerate(loaded(known, tensors, checkpoint, layouts)):
        for name, array in expected.items():
            assert tuple(known.parameters(rank)[name]["stride"]) == contiguous_strides(array.shape)


@pytest.mark.parametrize(("model", "case"), beside(QUANTISED))
def test_engine_parameters_of_float8_and_their_scales_are_those_sglang_loads(model: str, case: str) -> None:
    known = read(model, case)
    family = family_of(known.hf)
    shapes = family.tensors(known.hf)
    checkpoint = with_scales(family.hf_layout(known.hf, "int32"), shapes, quantised, quantised=False)
    tensors = with_scale_tensors(shapes, quantised)
    plain = [family.sglang_layout(known.hf, known.engine, rank, "int32") for rank in range(known.engine.world)]
    loaded(known, tensors, checkpoint, [with_scales(layout, shapes, quantised, quantised=False) for layout in plain])
    for rank, layout in enumerate(plain):
        held = with_scales(layout, shapes, quantised, quantised=True).storages
        assert {name for name, one in held.items() if one.dtype == FLOAT8} == {
            name for name, entry in known.parameters(rank).items() if entry["dtype"] == FLOAT8
        }


@pytest.mark.parametrize("name", ["deepseek", "qwen3_moe"])
def test_data_parallel_ranks_have_the_attention_of_a_smaller_engine_and_all_else_of_the_whole_one(name: str) -> None:
    hf = MODELS[name]
    family, parallel = family_of(hf), EngineParallel(4, 2, attn_dp=2)
    for rank in range(4):
        found, small, whole = (
            family.sglang_layout(hf, sizes, at, "int32").pieces_by_storage
            for sizes, at in ((parallel, rank), (EngineParallel(2), rank % 2), (EngineParallel(4, 2), rank))
        )
        assert found.keys() == whole.keys()
        for storage, pieces in found.items():
            other = small if ".self_attn." in storage or "embed_tokens" in storage else whole
            assert [(p.tensor, p.box, p.offset) for p in pieces] == [(p.tensor, p.box, p.offset) for p in other[storage]]
