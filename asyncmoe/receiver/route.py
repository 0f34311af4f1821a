"""The plan of an update: from every trainer rank's parameters to every engine rank's."""

from __future__ import annotations

from typing import Any

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.receiver.meeting import Terms
from asyncmoe.reshard import Plan, RankLayout, plan


def engine_layouts(terms: Terms) -> list[RankLayout]:
    """What every engine rank holds, under its rank in the weight group."""
    family = family_of(terms.hf)
    return [
        layout
        for engine in terms.engines
        for layout in family.sglang_layouts(terms.hf, EngineParallel(engine.tp, engine.ep), terms.engine_dtype, first=engine.first)
    ]


def route(terms: Terms, rank: int) -> Plan:
    """A rank's part of the plan, with the digest of the whole.

    Raises:
        LayoutError: the two sides' layouts contradict each other.
    """
    family = family_of(terms.hf)
    fields: dict[str, Any] = terms.trainer
    source = family.megatron_layouts(terms.hf, MegatronParallel(**fields), terms.dtype)
    return plan(family.tensors(terms.hf), source, engine_layouts(terms), ranks=[rank])
