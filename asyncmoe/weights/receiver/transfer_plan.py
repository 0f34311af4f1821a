"""The plan of an update: which bytes each trainer rank sends to each engine rank."""

from __future__ import annotations

from asyncmoe.models.payload import Payload
from asyncmoe.reshard import Plan, RankLayout, plan
from asyncmoe.weights.protocol import Terms


def engine_layouts(terms: Terms) -> list[RankLayout]:
    """Return the layout of every engine rank, numbered by its rank in the meeting."""
    payload = Payload(terms.hf, terms.adapter)
    return [layout for one in terms.engines for layout in payload.engines(one.parallel, terms.engine_dtype, first=one.first)]


def route(terms: Terms, rank: int) -> Plan:
    """Return one rank's part of the plan, with the digest of the whole plan.

    Raises:
        LayoutError: the trainer's and the engines' layouts contradict each other.
    """
    payload = Payload(terms.hf, terms.adapter)
    return plan(payload.tensors(), payload.trainer(terms.trainer, terms.dtype), engine_layouts(terms), ranks=[rank])
