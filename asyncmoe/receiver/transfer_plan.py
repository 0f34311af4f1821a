"""The plans of an update: which bytes each trainer rank sends to each engine rank, and which an engine rank passes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.payload import Payload
from asyncmoe.receiver.protocol import Terms
from asyncmoe.reshard import Plan, RankLayout, plan, relay
from asyncmoe.reshard.relay import relay_matches, replicas

_LEAST_GAIN = 1.1


@dataclass(frozen=True, eq=False)
class UpdatePlans:
    """What a rank moves in the updates of a meeting.

    Attributes:
        full: the plan of a full update; with a relay, those of its two rounds.
        delta: the plan of a delta, which has only the first rank of each set of replicas.
        replicas: by engine rank of `delta`, all engine ranks that get the same, in order; without a relay the rank alone.
    """

    full: tuple[Plan, ...]
    delta: Plan
    replicas: Mapping[int, tuple[int, ...]]

    def first(self, rank: int) -> int:
        """Return the rank of `delta` whose messages a rank gets, or sends."""
        return next((first for first, ranks in self.replicas.items() if rank in ranks), rank)

    def peers(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the ranks to which a rank sends messages of deltas, and those from which it gets them."""
        first = self.first(rank)
        others = [other for other in self.replicas.get(first, ()) if other != rank]
        targets = [to for one in self.delta.transfers if one.source == rank != one.destination for to in self.replicas[one.destination]]
        sources = [one.source for one in self.delta.transfers if one.destination == first != one.source]
        return [*targets, *others], [*sources, *others]


def direct(full: Plan) -> UpdatePlans:
    """Return the plans without a relay."""
    return UpdatePlans((full,), full, {rank: (rank,) for rank in full.match.side.ranks.tolist()})


def update_plans(terms: Terms, rank: int, full: Plan) -> UpdatePlans:
    """Return a rank's plans, by the terms as the verdict settled them.

    Args:
        full: the rank's part of the plan without a relay, as `route` returns it.
    """
    if not terms.relay:
        return direct(full)
    payload, engines = _payload(terms), engine_layouts(terms)
    source, equal = payload.trainer(_parallel(terms), terms.dtype), replicas(full)
    rounds = relay(payload.tensors(), source, engines, ranks=[rank])
    plans = UpdatePlans(rounds, full, equal)
    firsts = [layout for layout in engines if layout.rank in equal]
    return UpdatePlans(rounds, plan(payload.tensors(), source, firsts, ranks=[plans.first(rank)]), equal)


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


def relay_faster(terms: Terms, full: Plan, host_of: Mapping[int, str]) -> bool:
    """Return whether a full update takes less time if replicas pass on what they receive: by a tenth at least, if the network card of each
    host is the bottleneck.

    Args:
        full: as for `update_plans`.
        host_of: host of each rank.
    """
    payload = _payload(terms)
    if len(replicas(full)) == len(full.match.side.ranks):
        return False
    rounds = relay_matches(payload.tensors(), payload.trainer(_parallel(terms), terms.dtype), engine_layouts(terms))
    relayed = np.concatenate([one.traffic() for one in rounds])
    return busiest(full.match.traffic(), host_of) > _LEAST_GAIN * busiest(relayed, host_of)


def busiest(traffic: np.ndarray, host_of: Mapping[int, str]) -> int:
    """Return the most bytes that a host sends, or receives, over its network card.

    Args:
        traffic: int64[n, 3]: source rank, destination rank, bytes (`Match.traffic`).
        host_of: host of each rank.
    """
    out: dict[str, int] = {}
    into: dict[str, int] = {}
    for source, destination, nbytes in traffic.tolist():
        here, there = host_of[source], host_of[destination]
        if here != there:
            out[here], into[there] = out.get(here, 0) + nbytes, into.get(there, 0) + nbytes
    return max([0, *out.values(), *into.values()])


def _parallel(terms: Terms) -> MegatronParallel:
    fields: dict[str, Any] = terms.trainer
    return MegatronParallel(**fields)


def _payload(terms: Terms) -> Payload:
    sent = terms.adapter
    return Payload(terms.hf, None if sent is None else Kind(sent.targets, sent.rank, sent.alpha, sent.experts))
