"""A record as flat (name, labels) -> number pairs, for sinks that know nothing of its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from asyncmoe.telemetry.schema import Evaluation, Rollout, Step

LABELS = {
    "ages": "age",
    "rejected_by_age": "age",
    "rejected_by_rule": "rule",
    "ratio_quantiles": "quantile",
    "routing_differs": "layer",
    "dropped": "reason",
    "failed": "reason",
    "rejected": "reason",
    "requeued": "reason",
    "engine_busy_share": "engine",
}
"""What the keys of a field that is a mapping are."""


def numbers(record: Step | Rollout | Evaluation) -> Iterator[tuple[str, str | None, float]]:
    """Field, key within the field (None for a plain number), value; for all that was measured, time and step apart."""
    for name, value in msgspec.structs.asdict(record).items():
        if name in ("time", "step"):
            continue
        if isinstance(value, Mapping):
            yield from ((name, str(key), float(number)) for key, number in value.items())
        elif isinstance(value, int | float):
            yield name, None, float(value)
