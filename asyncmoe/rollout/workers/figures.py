"""Statistics of scorers and tools, which run in each rollout worker: sent with its news, added up by the controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from asyncmoe.errors import ProtocolError
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.scoring.stages import stats
from asyncmoe.telemetry.rollout_schema import Calls, Scoring


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statistics by the name of a stage of scoring, and by that of a tool; as in `asyncmoe.telemetry.rollout_schema.Rollout`."""

    scoring: dict[str, Scoring] = msgspec.field(default_factory=dict)
    tools: dict[str, Calls] = msgspec.field(default_factory=dict)


def figures_of(loaded: RolloutParts) -> Figures:
    """Return the statistics of this process."""
    environment = loaded.environment
    counts = environment.counts if isinstance(environment, WithTools) else {}
    stages = {name: msgspec.convert(one, Scoring, from_attributes=True) for name, one in stats(loaded.scorer).items()}
    return Figures(stages, {name: msgspec.convert(one, Calls, from_attributes=True) for name, one in counts.items()})


def read(sent: bytes) -> Figures:
    """Read what `msgspec.msgpack.encode` made of figures. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(sent, type=Figures)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a rollout worker's figures: {error}") from error


def added(several: Iterable[Figures]) -> Figures:
    """Return the sum of several processes' figures; a breaker that is not closed in one of them counts."""
    scored: dict[str, list[Scoring]] = {}
    called: dict[str, list[Calls]] = {}
    for one in several:
        for name, stage in one.scoring.items():
            scored.setdefault(name, []).append(stage)
        for name, tool in one.tools.items():
            called.setdefault(name, []).append(tool)
    return Figures({name: _stage(all_) for name, all_ in scored.items()}, {name: _tool(all_) for name, all_ in called.items()})


def _stage(some: list[Scoring]) -> Scoring:
    breaker = next((one.breaker for one in some if one.breaker != "closed"), "closed")
    sums = _sums(some, ("in_flight", "waiting", "scored", "retried", "seconds", "wait_seconds"))
    return Scoring(failed=_merged(one.failed for one in some), breaker=breaker, **sums)


def _tool(some: list[Calls]) -> Calls:
    return Calls(failures=_merged(one.failures for one in some), **_sums(some, ("calls", "seconds")))


def _sums(some: Iterable[object], names: Iterable[str]) -> dict[str, Any]:
    every = list(some)
    return {name: sum(getattr(one, name) for one in every) for name in names}


def _merged(some: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for one in some:
        counts.update(one)
    return dict(counts)
