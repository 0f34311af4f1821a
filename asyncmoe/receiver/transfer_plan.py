"""The plan of an update: from every trainer rank's memory to every engine rank's."""

from __future__ import annotations

from typing import Any

from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.payload import Payload
from asyncmoe.receiver.protocol import Terms
from asyncmoe.reshard import Plan, RankLayout, plan


def engine_layouts(terms: Terms) -> list[RankLayout]:
    """What every engine rank receives, under its rank in the weight group."""
    payload = _payload(terms)
    return [
        layout
        for engine in terms.engines
        for layout in payload.engines(EngineParallel(engine.tp, engine.ep), terms.engine_dtype, first=engine.first)
    ]


def route(terms: Terms, rank: int) -> Plan:
    """A rank's part of the plan, with the digest of the whole.

    Raises:
        LayoutError: the two sides' layouts contradict each other.
    """
    payload = _payload(terms)
    fields: dict[str, Any] = terms.trainer
    return plan(payload.tensors(), payload.trainer(MegatronParallel(**fields), terms.dtype), engine_layouts(terms), ranks=[rank])


def _payload(terms: Terms) -> Payload:
    sent = terms.adapter
    return Payload(terms.hf, None if sent is None else Kind(sent.targets, sent.rank, sent.alpha, sent.experts))
