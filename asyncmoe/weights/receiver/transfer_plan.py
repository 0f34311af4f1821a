"""The plan of an update: which bytes each trainer rank sends to each engine rank."""

from __future__ import annotations

from typing import Any

from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.payload import Payload
from asyncmoe.reshard import Plan, RankLayout, plan
from asyncmoe.weights.protocol import Terms


def engine_layouts(terms: Terms) -> list[RankLayout]:
    """Return the layout of every engine rank, under its rank in the meeting."""
    payload = _payload(terms)
    return [
        layout
        for engine in terms.engines
        for layout in payload.engines(EngineParallel(engine.tp, engine.ep), terms.engine_dtype, first=engine.first)
    ]


def route(terms: Terms, rank: int) -> Plan:
    """Return a rank's part of the plan, with the digest of the whole plan.

    Raises:
        LayoutError: the trainer's and the engines' layouts contradict each other.
    """
    payload = _payload(terms)
    return plan(payload.tensors(), payload.trainer(_parallel(terms), terms.dtype), engine_layouts(terms), ranks=[rank])


def _parallel(terms: Terms) -> MegatronParallel:
    fields: dict[str, Any] = terms.trainer
    return MegatronParallel(**fields)


def _payload(terms: Terms) -> Payload:
    sent = terms.adapter
    return Payload(terms.hf, None if sent is None else Kind(sent.targets, sent.rank, sent.alpha, sent.experts))
