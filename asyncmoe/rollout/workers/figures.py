"""Statistics of scorers and tools, which run in each rollout worker: sent with its news, added up by the controller."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from asyncmoe.errors import ProtocolError
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.scoring.stages import stats
from asyncmoe.telemetry.rollout_schema import Calls, Scoring

Summed = TypeVar("Summed", Scoring, Calls)


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statistics by the name of a stage of scoring, and by that of a tool; as in `asyncmoe.telemetry.rollout_schema.Rollout`."""

    scoring: dict[str, Scoring] = msgspec.field(default_factory=dict)
    tools: dict[str, Calls] = msgspec.field(default_factory=dict)


def figures_of(loaded: RolloutParts) -> Figures:
    """Return the statistics of this process."""
    environment = loaded.environment
    counts = environment.counts if isinstance(environment, WithTools) else {}
    return Figures(dict(stats(loaded.scorer)), {name: msgspec.convert(one, Calls, from_attributes=True) for name, one in counts.items()})


def read(sent: bytes) -> Figures:
    """Read what `msgspec.msgpack.encode` made of figures. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(sent, type=Figures)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a rollout worker's figures: {error}") from error


def added(several: Iterable[Figures]) -> Figures:
    """Return the sum of several processes' figures."""
    scored, called = defaultdict[str, list[Scoring]](list), defaultdict[str, list[Calls]](list)
    for one in several:
        for name, stage in one.scoring.items():
            scored[name].append(stage)
        for name, tool in one.tools.items():
            called[name].append(tool)
    return Figures({name: _sum(some) for name, some in scored.items()}, {name: _sum(some) for name, some in called.items()})


def _sum(some: Sequence[Summed]) -> Summed:
    kind = type(some[0])
    return kind(**{name: _total([getattr(one, name) for one in some]) for name in kind.__struct_fields__})


def _total(values: Sequence[Any]) -> Any:
    return dict(sum(map(Counter, values), Counter[str]())) if isinstance(values[0], Mapping) else sum(values)
