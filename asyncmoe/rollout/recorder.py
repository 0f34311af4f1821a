"""The controller's records in the run directory: counters once a second, evaluations, and the busy intervals of each engine."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from asyncmoe.queue.accounts import Accounts
from asyncmoe.telemetry.clock import unix
from asyncmoe.telemetry.metric import declared
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, EVALUATION, ROLLOUT, Span


class Recorder:
    """Writes rollout.jsonl, evaluation.jsonl (`evaluations`) and spans-controller.jsonl of `run_dir`."""

    def __init__(self, run_dir: Path) -> None:
        self._lines, self._spans = JsonLines(run_dir / ROLLOUT), JsonLines(run_dir / CONTROLLER_SPANS)
        self.evaluations = JsonLines(run_dir / EVALUATION)
        self._generated: list[tuple[float, float, str]] = []
        self._until: defaultdict[str, float] = defaultdict(float)
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._last, self._last_tokens = unix(), 0

    def generated(self, engine: str, begin: float, end: float) -> None:
        """Record that `engine` was generating from `begin` to `end`, Unix seconds; reports of several workers may overlap."""
        self._generated.append((begin, end, engine))

    def paused(self, engine: str, begin: float, end: float) -> None:
        """Record that `engine` was paused from `begin` to `end`, Unix seconds."""
        self._spans.write(Span(engine, "pause", begin, end))

    def write(
        self,
        version: int,
        accounts: Accounts,
        engines: list[str],
        pool: object,
        **counted: Any,
    ) -> None:
        """Record the current counters: `Rollout` declares those that are copied; `counted` has the others by name."""
        now = unix()
        seconds = max(now - self._last, 1e-6)
        self._merge()
        sources = {"ledger": accounts.ledger, "accounts": accounts, "pool": pool}
        copied = {name: getattr(sources[metric.source], name) for name, metric in declared(Rollout).items() if metric.source}
        tokens = copied["generated_tokens"]
        self._lines.write(
            Rollout(
                time=now,
                version=version,
                queue_depth=accounts.ledger.queued,
                dropped=accounts.all_dropped,
                tokens_per_s=(tokens - self._last_tokens) / seconds,
                engine_utilization={name: min(self._busy[name] / seconds, 1.0) for name in engines},
                **copied,
                **counted,
            )
        )
        self._busy.clear()
        self._last, self._last_tokens = now, tokens

    def _merge(self) -> None:
        """Count each moment of generation once."""
        for begin, end, engine in sorted(self._generated):
            begin = max(begin, self._until[engine])
            if begin < end:
                self._spans.write(Span(engine, "generate", begin, end))
                self._busy[engine] += end - begin
                self._until[engine] = end
        self._generated.clear()

    def close(self) -> None:
        """Flush, and close all files."""
        self._merge()
        self._lines.close()
        self.evaluations.close()
        self._spans.close()
