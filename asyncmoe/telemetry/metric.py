"""Metrics: their declaration beside a field of a record, and what readers derive from it.

A field of a record is a metric if its type is annotated with a `Metric`; a field annotated with a string is described, but not exported.
TensorBoard, Prometheus, the terminal and docs/metrics.md know no metric by name: they show what is declared. The report does the same,
except that `report.plots` puts several metrics into a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_type_hints

import msgspec

Amount = float | None
"""A number; None: not measured."""
Count = int | None
"""A whole number; None: not measured."""


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric.

    Attributes:
        help: one or two sentences, for Prometheus and docs/metrics.md.
        unit: unit in words, the label of the figure's axis. If it begins with "share", values are between 0 and 1, and people see per cent.
        key: meaning of a mapping's keys; the label in Prometheus.
        word: its name in a step's line on the terminal; "" omits it.
        over_updates: how the values of a step's optimizer updates (`StepMetrics.figures` of the trainer) become a single value.
        source: the queue's statistics or the engine pool, from which the record copies the attribute of the same name.
    """

    help: str
    unit: str = ""
    key: str = ""
    word: str = ""
    over_updates: Literal["mean", "sum", "first"] = "mean"
    source: Literal["queue", "pool"] | None = None

    @property
    def is_share(self) -> bool:
        return self.unit.startswith("share")


class Number(NamedTuple):
    """A measured number of a record, and its declaration. `key`: the key of an entry of a mapping; None for a plain number. `label`:
    meaning of the key."""

    name: str
    label: str | None
    key: str | None
    value: float
    metric: Metric


@cache
def declared(kind: type[msgspec.Struct]) -> Mapping[str, Metric]:
    """Return the metrics of a kind of record by field, in the order of its fields."""
    found = ((name, getattr(hint, "__metadata__", (None,))[0]) for name, hint in get_type_hints(kind, include_extras=True).items())
    return {name: metric for name, metric in found if isinstance(metric, Metric)}


def numbers(record: msgspec.Struct) -> Iterator[Number]:
    """Yield every measured number of a record's metrics.

    A field that maps to records yields each of their metrics under both fields' names ("tools_calls"); counts by reason are summed.
    """
    for name, metric in declared(type(record)).items():
        value = getattr(record, name)
        if not isinstance(value, Mapping):
            yield from _plain(name, None, None, value, metric)
            continue
        for key, inner in value.items():
            if not isinstance(inner, msgspec.Struct):
                yield from _plain(name, metric.key, str(key), inner, metric)
                continue
            for part, of_part in declared(type(inner)).items():
                counted: Any = getattr(inner, part)
                whole = sum(counted.values()) if isinstance(counted, Mapping) else counted
                yield from _plain(f"{name}_{part}", metric.key, str(key), whole, of_part)


def _plain(name: str, label: str | None, key: str | None, value: Any, metric: Metric) -> Iterator[Number]:
    if isinstance(value, int | float):
        yield Number(name, label, key, float(value), metric)
