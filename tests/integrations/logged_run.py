"""A run's folder with records for a logger, and the figures that the logger must have of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncmoe.config import Config
from asyncmoe.telemetry.loggers.sink import FOLDER, LoggerSink, LoggerState, client, read
from asyncmoe.telemetry.metric import numbers
from asyncmoe.telemetry.records import Follower, read_evaluations, read_steps
from asyncmoe.telemetry.schema import EVALUATION, METRICS
from tests.configs import minimal
from tests.unit.telemetry_runs import write_run

__all__ = ["by_step", "config_of", "figures", "sent", "write_run"]


def config_of(run_dir: Path, **telemetry: Any) -> Config:
    """The configuration of a run of 2 + 8 steps, also written into its folder."""
    made = minimal(run_dir, steps=8, warmup={"steps": 2}, telemetry=telemetry)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    return made


def sent(config: Config, name: str) -> LoggerState:
    """Send a logger what it misses of a run, as the next start of the run does, and return what it has then."""
    said: list[str] = []
    sink = LoggerSink(config, name, client(config, name), Follower(config.run.dir).poll(), said.append)
    sink.feed([])
    sink.close()
    assert not [text for text in said if ";" in text], said
    return read(config.run.dir / FOLDER / f"{name}.json")


def figures(run_dir: Path) -> dict[tuple[str, int], float]:
    """Every figure of metrics.jsonl and evaluation.jsonl, by its name and step."""
    found = {}
    for step in read_steps(run_dir / METRICS):
        found |= {(_name(one), step.step): one.value for one in numbers(step)}
    for evaluation in read_evaluations(run_dir / EVALUATION):
        found |= {(f"evaluation/{_name(one)}", evaluation.version): one.value for one in numbers(evaluation)}
    return found


def by_step(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[tuple[str, int], Any]:
    """Figures by name and step of what a logger has, (step, figures by name) each; but for those of the rollout, each is there once."""
    found: dict[tuple[str, int], Any] = {}
    for step, row in rows:
        kept = {(name, step): value for name, value in row.items() if not name.startswith("rollout/")}
        assert not kept.keys() & found.keys(), "each figure once"
        found |= kept
    return found


def _name(one: Any) -> str:
    return one.name if one.key is None else f"{one.name}/{one.key}"
