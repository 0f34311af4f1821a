"""Flatten a record into (name, label) -> number pairs, for sinks that do not know its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from asyncmoe.telemetry.schema import Evaluation, Rollout, Step

_LABELS = {
    "ages": "age",
    "rejected_by_age": "age",
    "rejected_by_rule": "rule",
    "ratio_quantiles": "quantile",
    "plugin_metrics": "name",
    "routing_differs": "layer",
    "dropped": "reason",
    "failed": "reason",
    "rejected": "reason",
    "requeued": "reason",
    "engine_busy_share": "engine",
    "scoring": "who",
    "tools": "tool",
}


def label(name: str) -> str:
    """Return the label that describes the keys of a mapping field."""
    return _LABELS[name if name in _LABELS else name.partition("_")[0]]


def numbers(record: Step | Rollout | Evaluation) -> Iterator[tuple[str, str | None, float]]:
    """Yield field, key within the field (None for a plain number) and value of every measured number except time and step.

    For a mapping to records, each of their fields counts as one field ("tools_calls"); its counts by reason are summed.
    """
    for name, value in msgspec.structs.asdict(record).items():
        if name in ("time", "step"):
            continue
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from _of_key(name, str(key), inner)
        elif isinstance(value, int | float):
            yield name, None, float(value)


def _of_key(name: str, key: str, value: Any) -> Iterator[tuple[str, str, float]]:
    if not isinstance(value, msgspec.Struct):
        yield name, key, float(value)
        return
    for field, inner in msgspec.structs.asdict(value).items():
        if isinstance(inner, Mapping):
            yield f"{name}_{field}", key, float(sum(inner.values()))
        elif isinstance(inner, int | float):
            yield f"{name}_{field}", key, float(inner)
