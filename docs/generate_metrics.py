"""Write docs/metrics.md from the declarations of the records' fields. `make docs` runs this script.

The page depends on `asyncmoe.telemetry.schema`, `rollout_schema` and `report.plots` alone. tests/unit/test_telemetry_metric.py compares it
with the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec

from asyncmoe.telemetry.metric import Metric
from asyncmoe.telemetry.report.plots import PLOTS
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import EVALUATION, METRICS, ROLLOUT, Step

OUT = Path(__file__).parent / "metrics.md"
HEAD = """\
# Metrics

<!-- Made by docs/generate_metrics.py from asyncmoe/telemetry: schema.py, rollout_schema.py and report/plots.py. After a change of them:
`make docs`. -->

A run writes these records to its directory `run.dir`, one JSON object a line. A number that was not measured is `null`. The last column
names the figure of `report.html` that draws the field; metrics without an entry there are drawn in the report's last section.
`metrics.jsonl` also has a line `{"resumed_at": S, ...}` for each start of the trainer from step S, after which earlier records of steps
above S no longer count.
[CONTRIBUTING](../CONTRIBUTING.md#a-new-metric) says how to add a metric.

TensorBoard has every number as `step/<field>`, `rollout/<field>` or `evaluation/<field>`;
Prometheus as `asyncmoe_step_<field>`, `asyncmoe_rollout_<field>` or `asyncmoe_evaluation_<field>`. A field with an entry in
column *by* is a mapping: in TensorBoard, each key is a tag of its own (`step/ages/0`), in Prometheus a label
(`asyncmoe_step_ages{age="0"}`). `scoring` and `tools` map names to objects; `scoring_failed` is the field `failed` of an object in
`scoring`. TensorBoard and Prometheus have the sum of `failed` over all reasons.
"""


def _fields(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        annotated, about = get_args(hint)
        metric = about if isinstance(about, Metric) else Metric(about)
        drawn = next((_plain(plot.title) for plot in PLOTS if plot.kind is kind and name in plot.curves), "")
        yield f"| `{prefix}{name}` | {_plain(metric.help)} | {metric.unit} | {metric.key} | {drawn} |"
        inner = [part for part in get_args(annotated) if isinstance(part, type) and issubclass(part, msgspec.Struct)]
        for record in inner:
            yield from _fields(record, f"{name}_")


def generate() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for file, kind in ((METRICS, Step), (ROLLOUT, Rollout), (EVALUATION, Evaluation)):
        parts += [
            f"## {file}\n",
            " ".join((kind.__doc__ or "").split()) + "\n",
            "| field | meaning | unit | by | figure |\n|---|---|---|---|---|",
        ]
        parts += [*_fields(kind), ""]
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Escape characters that Markdown would interpret."""
    return re.sub(r"([|<>*])", r"\\\1", text)


if __name__ == "__main__":
    OUT.write_text(generate())
