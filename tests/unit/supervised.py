"""A supervised run whose parts are scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch import rule, watch
from asyncmoe.launch.run_processes import Process, RunPart, RunParts
from asyncmoe.process import Child

Starts = Callable[[int], Process]
"""Starts a part, given the number of earlier starts."""


def table_of(config: Config, starts: Mapping[str, Starts]) -> tuple[RunParts, Callable[[], None]]:
    """Parts of one process each, which end with a signal, and what ends all of them."""
    begun: dict[str, Child] = {}
    rules = rule.table(config, [name for name in starts if name.startswith("engine")], spare=True)

    def part(name: str, start: Starts) -> RunPart:
        def begin(before: int) -> tuple[Process, ...]:
            begun[name] = child = start(before)  # type: ignore[assignment]
            return (child,)

        return RunPart(rules[name], begin, lambda: begun[name].end(0.0))

    def end() -> None:
        for child in begun.values():
            child.end(1.0)

    return {name: part(name, start) for name, start in starts.items()}, end


def supervised(config: Config, folder: Path, scripts: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Supervise shell scripts, one a start of each part, the last again and again; return how often each part was started."""
    counts = dict.fromkeys(scripts, 0)

    def started(name: str) -> Starts:
        def start(before: int) -> Process:
            script = scripts[name][min(counts[name], len(scripts[name]) - 1)].format(folder)
            counts[name] += 1
            return Child(name, ["sh", "-c", script], folder / f"{name}.log", {"BEFORE": str(before)})

        return start

    watch.supervise(config, *table_of(config, {name: started(name) for name in scripts}))
    return counts
